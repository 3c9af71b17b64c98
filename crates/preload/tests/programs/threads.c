/* threads DIR: threads that read and write, one that opens and closes without the library's knowledge, and a signal
 * handler that interrupts them all and reads as well. */
#include "common.h"

enum { THREADS = 3, ROUNDS = 4000, BLOCK = 512 };

static int shared_fd, handler_fd;
static const char *dir;
static volatile sig_atomic_t interrupted, ended;

static void on_signal(int number) {
    (void)number;
    int error = errno;
    char bytes[64];
    errno = 77;
    if (pread(handler_fd, bytes, sizeof bytes, 128) != sizeof bytes || !is_all(bytes, sizeof bytes, 'h') || errno != 77)
        _exit(3);
    interrupted = interrupted + 1;
    errno = error;
}

static void *own_part(void *argument) {
    int self = (int)(intptr_t)argument;
    uint64_t state = 99991u + (uint64_t)self;
    char block[BLOCK], seen[BLOCK];
    for (int i = 0; i < ROUNDS; i++) {
        off_t at = (off_t)(self + THREADS * (int)(next_random(&state) % 8)) * BLOCK;
        memset(block, (char)next_random(&state), BLOCK);
        CHECK(pwrite(shared_fd, block, BLOCK, at) == BLOCK);
        CHECK(pread(shared_fd, seen, BLOCK, at) == BLOCK);
        CHECK(memcmp(block, seen, BLOCK) == 0);
    }
    return NULL;
}

/* Descriptors are closed without the library's knowledge, and their numbers are reused for other files. */
static void *other_files(void *argument) {
    (void)argument;
    char name[PATH_MAX], seen[64];
    for (int i = 0; i < ROUNDS; i++) {
        snprintf(name, sizeof name, "%s/filled%d", dir, i % 3);
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0);
        CHECK(pread(fd, seen, sizeof seen, 10) == sizeof seen);
        CHECK(is_all(seen, sizeof seen, (char)('0' + i % 3)));
        if (i % 7 == 0) CHECK(close(fd) == 0);
        else CHECK(syscall(SYS_close, fd) == 0);
    }
    return NULL;
}

static void *wait_in_vain(void *argument) {
    char byte;
    /* `pread` is a cancellation point in libc, and must stay one with the hook. */
    while (!ended) CHECK(pread(*(int *)argument, &byte, 1, 0) == 1);
    return NULL;
}

int main(int count_of, char **arguments) {
    CHECK(count_of == 2);
    dir = arguments[1];
    for (int i = 0; i < 3; i++) close(filled(dir, i, (char)('0' + i), 4096));
    shared_fd = filled(dir, 7, 's', THREADS * 8 * BLOCK);
    handler_fd = filled(dir, 8, 'h', 4096);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGPROF, &action, NULL) == 0);
    struct itimerval often = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_PROF, &often, NULL) == 0);
    pthread_t threads[THREADS + 1];
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, own_part, (void *)(intptr_t)i) == 0);
    CHECK(pthread_create(&threads[THREADS], NULL, other_files, NULL) == 0);
    for (int i = 0; i <= THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    memset(&often, 0, sizeof often);
    CHECK(setitimer(ITIMER_PROF, &often, NULL) == 0);
    pthread_t waiting;
    CHECK(pthread_create(&waiting, NULL, wait_in_vain, &handler_fd) == 0);
    ended = 1;
    CHECK(pthread_join(waiting, NULL) == 0);
    CHECK(interrupted > 0);
    if (stands_in()) {
        CHECK(served() > ROUNDS);
        /* Two files are open; each number that was last closed without the library's knowledge keeps one guard. */
        CHECK(guards() <= 2 + 2 * (THREADS + 1));
    }
    return 0;
}
