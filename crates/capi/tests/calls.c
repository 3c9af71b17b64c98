/* Tests what the library promises and what it must refuse. Usage: calls HOST:PORT; the pool has eight MiB. */
#undef NDEBUG
#include <assert.h>
#include <errno.h>
#include <farpool.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20, THREADS = 4, ROUNDS = 50, PIECE = 10000, FORKS = 8, HANG_S = 120 };

static farpool *pool;
static atomic_long reported;
static atomic_long bytes_reported;

static void count(void *context, ssize_t result) {
    assert(context == &reported);
    bytes_reported += result;
    reported++;
}

static void refuses_what_makes_no_sense(const char *broker) {
    farpool *other = NULL;
    farpool_file *file = NULL;
    char byte;
    assert(farpool_connect(NULL, &other) == -EINVAL && strstr(farpool_last_error(), "FARPOOL_BROKER"));
    struct farpool_options options = {.broker = broker, .transport = "pigeon"};
    assert(farpool_connect(&options, &other) == -EINVAL && strstr(farpool_last_error(), "pigeon"));
    options.transport = "verbs";
    assert(farpool_connect(&options, &other) == -EINVAL);
    options = (struct farpool_options){.broker = broker, .tls_dir = "/nowhere"};
    assert(farpool_connect(&options, &other) == -EINVAL && strstr(farpool_last_error(), "/nowhere"));
    options = (struct farpool_options){.broker = broker};
    assert(farpool_connect(&options, NULL) == -EINVAL && other == NULL);
    assert(farpool_open(pool, "nothing", &file) == -ENOENT && strstr(farpool_last_error(), "nothing"));
    assert(farpool_open(NULL, "nothing", &file) == -EINVAL);
    assert(farpool_create(pool, NULL, 1, &file) == -EINVAL);
    assert(farpool_create(pool, "", 1, &file) == -EINVAL);
    assert(farpool_create(pool, "\xff\xfe", 1, &file) == -EINVAL && strstr(farpool_last_error(), "UTF-8"));
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert(farpool_create(pool, name, 1, &file) == -ENAMETOOLONG);
    assert(farpool_create(pool, "large", UINT64_MAX, &file) == -EFBIG);
    assert(farpool_create(pool, "more than the limit", 7 * MIB, &file) == -ENOSPC);
    assert(file == NULL);
    assert(farpool_delete(pool, "more than the limit") == -ENOENT);
    assert(farpool_read(NULL, &byte, 1, 0) == -EINVAL);
    assert(farpool_write_async(NULL, &byte, 1, 0, count, NULL) == -EINVAL);
    assert(farpool_close(NULL) == -EINVAL);
    farpool_disconnect(NULL);
}

static farpool_file *never_given_out(void) {
    return (farpool_file *)(uintptr_t)0xdeadbeefcafef00d;
}

static void refuses_handles_that_are_not_open(const char *broker) {
    farpool *other;
    farpool_file *file, *left_open;
    uint64_t size;
    char byte = 0;
    struct farpool_options options = {.broker = broker};
    assert(farpool_read(never_given_out(), &byte, 1, 0) == -EBADF && strstr(farpool_last_error(), "open"));
    assert(farpool_open((farpool *)never_given_out(), "x", &file) == -EBADF);
    assert(farpool_create(pool, "closed", 1, &file) == 0);
    assert(farpool_write((farpool_file *)pool, &byte, 1, 0) == -EBADF); /* not a file */
    assert(farpool_close(file) == 0);
    assert(farpool_close(file) == -EBADF);
    assert(farpool_read(file, &byte, 1, 0) == -EBADF);
    assert(farpool_write(file, &byte, 1, 0) == -EBADF);
    assert(farpool_read_async(file, &byte, 1, 0, count, &reported) == -EBADF);
    assert(farpool_size(file, &size) == -EBADF && farpool_resize(file, 0) == -EBADF);
    assert(farpool_delete(pool, "closed") == 0);
    assert(farpool_connect(&options, &other) == 0);
    assert(farpool_create(other, "left open", 1, &left_open) == 0);
    assert(farpool_create(other, "more than there is", 64 * MIB, &file) == -ENOSPC);
    farpool_disconnect(other);
    farpool_disconnect(other); /* nothing more happens */
    assert(farpool_open(other, "left open", &file) == -EBADF);
    assert(farpool_read(left_open, &byte, 1, 0) == -EBADF && farpool_close(left_open) == -EBADF);
}

/* In a forked child, a new connection works and the parent's is refused. The parent is not affected. */
static void begins_anew_in_a_child(const char *broker) {
    farpool_file *file;
    char byte = 7;
    int status;
    assert(farpool_create(pool, "parent's", 1, &file) == 0 && farpool_write(file, &byte, 1, 0) == 1);
    pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        alarm(HANG_S); /* a child does not inherit the alarm */
        farpool *own;
        farpool_file *mine;
        struct farpool_options options = {.broker = broker};
        assert(farpool_read(file, &byte, 1, 0) == -EBADF && farpool_delete(pool, "parent's") == -EBADF);
        assert(farpool_connect(&options, &own) == 0 && farpool_create(own, "child's", 1, &mine) == 0);
        assert(mine != file && farpool_read(file, &byte, 1, 0) == -EBADF);
        assert(farpool_write(mine, "x", 1, 0) == 1 && farpool_read(mine, &byte, 1, 0) == 1 && byte == 'x');
        farpool_disconnect(own);
        _exit(0);
    }
    assert(waitpid(child, &status, 0) == child && status == 0);
    byte = 0;
    assert(farpool_read(file, &byte, 1, 0) == 1 && byte == 7);
    assert(farpool_close(file) == 0 && farpool_delete(pool, "parent's") == 0);
}

static void keeps_what_was_written(void) {
    farpool_file *file, *again, *none = NULL;
    uint64_t size;
    char data[PIECE], read[PIECE];
    assert(farpool_create(pool, "kept", 3 * MIB, &file) == 0);
    assert(farpool_create(pool, "kept", 1, &none) == -EEXIST && none == NULL);
    memset(read, 1, sizeof read);
    assert(farpool_read(file, read, PIECE, 12345) == PIECE);
    for (int i = 0; i < PIECE; i++)
        assert(read[i] == 0);
    for (int i = 0; i < PIECE; i++)
        data[i] = (char)(i * 7);
    assert(farpool_write(file, data, PIECE, 2 * MIB - 5000) == PIECE);
    assert(farpool_open(pool, "kept", &again) == 0);
    assert(farpool_read(again, read, PIECE, 2 * MIB - 5000) == PIECE && memcmp(read, data, PIECE) == 0);
    assert(farpool_read(again, read, PIECE, 3 * MIB - 10) == 10);
    assert(farpool_read(again, read, PIECE, 3 * MIB) == 0);
    assert(farpool_read(again, NULL, 0, 0) == 0);
    assert(farpool_read(again, NULL, 1, 0) == -EINVAL);
    assert(farpool_write(again, data, PIECE, UINT64_MAX - 5) == -EFBIG);
    assert(farpool_resize(again, 2 * MIB - 4000) == 0 && farpool_size(file, &size) == 0 && size == 2 * MIB - 4000);
    assert(farpool_resize(again, 2 * MIB) == 0);
    assert(farpool_read(file, read, PIECE, 2 * MIB - 5000) == 5000);
    assert(memcmp(read, data, 1000) == 0 && read[1000] == 0 && read[4999] == 0);
    assert(farpool_delete(pool, "kept") == 0);
    assert(farpool_open(pool, "kept", &none) == -ENOENT);
    assert(farpool_read(file, read, 1000, 2 * MIB - 5000) == 1000 && memcmp(read, data, 1000) == 0);
    assert(farpool_close(file) == 0 && farpool_close(again) == 0);
}

static void gives_memory_back(void) {
    for (int round = 0; round < 5; round++) {
        farpool_file *file;
        assert(farpool_create(pool, "most", 6 * MIB, &file) == 0);
        assert(farpool_close(file) == 0 && farpool_delete(pool, "most") == 0);
    }
}

static void *write_and_read(void *context) {
    farpool_file *file;
    int self = *(int *)context;
    unsigned char data[PIECE], read[PIECE];
    assert(farpool_open(pool, "shared", &file) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t offset = (uint64_t)(round * THREADS + self) * PIECE;
        memset(data, round + self, PIECE);
        assert(farpool_write(file, data, PIECE, offset) == PIECE);
        assert(farpool_read(file, read, PIECE, offset) == PIECE && memcmp(read, data, PIECE) == 0);
    }
    assert(farpool_close(file) == 0);
    return NULL;
}

static void serves_threads(void) {
    pthread_t threads[THREADS];
    int names[THREADS];
    farpool_file *file;
    assert(farpool_create(pool, "shared", 2 * MIB, &file) == 0);
    for (int i = 0; i < THREADS; i++) {
        names[i] = i;
        assert(pthread_create(&threads[i], NULL, write_and_read, &names[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert(farpool_close(file) == 0 && farpool_delete(pool, "shared") == 0);
}

static farpool_file *to_close;
static atomic_int close_answered;

static void close_it(void *context, ssize_t result) {
    assert(context == NULL && result == 1);
    close_answered = farpool_close(to_close);
    farpool_disconnect(pool); /* refused as well */
}

static void does_not_wait_for_itself(void) {
    static char byte;
    assert(farpool_create(pool, "waits", 1, &to_close) == 0);
    assert(farpool_write_async(to_close, &byte, 1, 0, close_it, NULL) == 0);
    assert(farpool_close(to_close) == 0);
    assert(close_answered == -EDEADLK);
    assert(farpool_delete(pool, "waits") == 0);
}

static int child_ended;

static void fork_and_return(void *context, ssize_t result) {
    assert(context == NULL && result == 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(HANG_S);
        return;
    }
    assert(waitpid(child, &child_ended, 0) == child);
}

/* A child that returns from a callback would go on with its parent's work. */
static void ends_a_child_that_returns_from_a_callback(void) {
    static char byte;
    farpool_file *file;
    assert(farpool_create(pool, "forks", 1, &file) == 0);
    assert(farpool_write_async(file, &byte, 1, 0, fork_and_return, NULL) == 0);
    assert(farpool_close(file) == 0);
    assert(WIFSIGNALED(child_ended) && WTERMSIG(child_ended) == SIGABRT);
    assert(farpool_delete(pool, "forks") == 0);
}

/* Closing waits for the operations in flight; too many of them are refused. */
static void reports_every_operation_once(void) {
    static char data[MIB];
    farpool_file *file;
    long accepted = 0, refused = 0;
    assert(farpool_create(pool, "async", 2 * MIB, &file) == 0);
    assert(farpool_write_async(file, data, 1, 0, NULL, NULL) == -EINVAL);
    while (refused == 0 && accepted < 100000) {
        int result = farpool_write_async(file, data, MIB, (accepted % 2) * MIB, count, &reported);
        assert(result == 0 || result == -EAGAIN);
        result == 0 ? accepted++ : refused++;
    }
    assert(refused > 0 && accepted > 1000);
    assert(farpool_close(file) == 0);
    assert(reported == accepted && bytes_reported == accepted * MIB);
    assert(farpool_open(pool, "async", &file) == 0);
    assert(farpool_read_async(file, data, MIB, MIB, count, &reported) == 0);
    farpool_disconnect(pool); /* waits, and closes the open file as well */
    assert(reported == accepted + 1);
}

int main(int argc, char **argv) {
    assert(argc == 2);
    alarm(HANG_S); /* ends a test that hangs */
    /* The limit leaves some memory for other connections. */
    struct farpool_options options = {.broker = argv[1], .transport = "auto", .limit_bytes = 6 * MIB};
    assert(farpool_connect(&options, &pool) == 0);
    assert(strlen(farpool_version()) >= 5);
    refuses_what_makes_no_sense(argv[1]);
    refuses_handles_that_are_not_open(argv[1]);
    for (int i = 0; i < FORKS; i++) /* several: a lock is hit by a fork only sometimes */
        begins_anew_in_a_child(argv[1]);
    keeps_what_was_written();
    gives_memory_back();
    serves_threads();
    does_not_wait_for_itself();
    ends_a_child_that_returns_from_a_callback();
    reports_every_operation_once();
    return 0;
}
