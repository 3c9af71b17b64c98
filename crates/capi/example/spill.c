/* Spills blocks to far memory with many writes in flight, and reads them back, as a sort or a hash join does.
 *
 *     cc -o spill spill.c $(pkg-config --cflags --libs farpool) -lpthread
 *     ./spill MIB               in the pool of this user's `farpool up`, or that of FARPOOL_BROKER
 *     ./spill MIB HOST:PORT
 */
#include <errno.h>
#include <farpool.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 256 * 1024, IN_FLIGHT = 8 };

/* Counts the operations in flight, and remembers the first failure. */
struct flight {
    pthread_mutex_t lock;
    pthread_cond_t landed;
    int in_flight;
    ssize_t failure;
};

static void landed(void *context, ssize_t result) {
    struct flight *flight = context;
    pthread_mutex_lock(&flight->lock);
    flight->in_flight--;
    if (result != BLOCK && flight->failure == 0)
        flight->failure = result < 0 ? result : -EIO;
    pthread_cond_signal(&flight->landed);
    pthread_mutex_unlock(&flight->lock);
}

/* Waits until at most `most` operations are in flight. */
static void wait_for(struct flight *flight, int most) {
    pthread_mutex_lock(&flight->lock);
    while (flight->in_flight > most)
        pthread_cond_wait(&flight->landed, &flight->lock);
    pthread_mutex_unlock(&flight->lock);
}

static void fill(unsigned char *block, unsigned number) {
    for (unsigned i = 0; i < BLOCK; i++)
        block[i] = (unsigned char)(number * 31 + i / 7);
}

static void check(const char *what, ssize_t result) {
    if (result < 0) {
        fprintf(stderr, "%s: %s (%s)\n", what, farpool_last_error(), strerror((int)-result));
        exit(1);
    }
}

static void spill(farpool_file *file, unsigned blocks) {
    static unsigned char buffers[IN_FLIGHT][BLOCK];
    struct flight flight = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    for (unsigned number = 0; number < blocks; number++) {
        if (number % IN_FLIGHT == 0)
            wait_for(&flight, 0); /* the buffers are free again */
        fill(buffers[number % IN_FLIGHT], number);
        pthread_mutex_lock(&flight.lock);
        flight.in_flight++;
        pthread_mutex_unlock(&flight.lock);
        check("write", farpool_write_async(file, buffers[number % IN_FLIGHT], BLOCK, (uint64_t)number * BLOCK, landed,
                                           &flight));
    }
    wait_for(&flight, 0);
    if (flight.failure != 0) {
        fprintf(stderr, "a write failed: %s\n", strerror((int)-flight.failure));
        exit(1);
    }
}

static void compare(farpool_file *file, unsigned blocks) {
    unsigned char *read = malloc(BLOCK), *expected = malloc(BLOCK);
    if (read == NULL || expected == NULL)
        abort();
    for (unsigned number = blocks; number-- > 0;) {
        ssize_t bytes = farpool_read(file, read, BLOCK, (uint64_t)number * BLOCK);
        check("read", bytes);
        fill(expected, number);
        if (bytes != BLOCK || memcmp(read, expected, BLOCK) != 0) {
            fprintf(stderr, "block %u is not what was written\n", number);
            exit(1);
        }
    }
    free(read);
    free(expected);
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: %s MIB [HOST:PORT]\n", argv[0]);
        return 2;
    }
    struct farpool_options options = {.broker = argc == 3 ? argv[2] : NULL};
    unsigned blocks = (unsigned)atoi(argv[1]) * (1024 * 1024 / BLOCK);
    farpool *pool;
    farpool_file *file;
    check("connect", farpool_connect(&options, &pool));
    check("create", farpool_create(pool, "spilled", (uint64_t)blocks * BLOCK, &file));
    spill(file, blocks);
    compare(file, blocks);
    check("close", farpool_close(file));
    check("delete", farpool_delete(pool, "spilled"));
    farpool_disconnect(pool);
    printf("%u blocks went to far memory and came back\n", blocks);
    return 0;
}
