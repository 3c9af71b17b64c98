/* edges DIR HOW: what programs do at the edges of the page cache, each in one way. Afterwards a read of the file by the
 * library and one by the kernel must agree; exit status 3 if they do not. `foreign` writes by a system call that no
 * library sees, so there they must differ. */
#include "common.h"

#include <time.h>

enum { PAGE = 8192, PAGES = 4, OLD = 3 };

static char page[PAGE];

static void pause_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static void put(int fd, int number, char fill) {
    memset(page, fill, PAGE);
    CHECK(pwrite(fd, page, PAGE, (off_t)number * PAGE) == PAGE);
}

/* A file with pages of A, B, C and D. */
static int make(const char *name) {
    unlink(name);
    int fd = open(name, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0);
    for (int number = 0; number < PAGES; number++) put(fd, number, (char)('A' + number));
    return fd;
}

/* Reads for long enough that the pages are cached. */
static void warm(int fd) {
    for (int round = 0; round < 60; round++) {
        for (int number = 0; number < PAGES; number++) CHECK(pread(fd, page, PAGE, (off_t)number * PAGE) >= 0);
        pause_ms(10);
    }
}

static int made_and_warm(const char *name) {
    int fd = make(name);
    warm(fd);
    return fd;
}

/* Compares one page. */
static int compare(int fd, int number) {
    char there[PAGE];
    ssize_t found = pread(fd, page, PAGE, (off_t)number * PAGE);
    ssize_t right = syscall(SYS_pread64, fd, there, PAGE, (off_t)number * PAGE);
    if (found == right && (found <= 0 || memcmp(page, there, (size_t)found) == 0)) return 0;
    fprintf(stderr, "page %d: %zd bytes of %c, should be %zd of %c\n", number, found, page[0], right, there[0]);
    return OLD;
}

static int foreign(void) {
    int fd = made_and_warm("file");
    CHECK(syscall(SYS_pwrite64, fd, "new", 3, 0) == 3);
    return compare(fd, 0);
}

/* An append goes to the end, whatever its position says. */
static int append(void) {
    int fd = made_and_warm("file"), end = open("file", O_RDWR | O_APPEND);
    put(end, 0, 'Z');
    return compare(fd, 0) | compare(fd, PAGES);
}

/* A file gets the inode and the descriptor of one that was unlinked within the same tick of the clock. */
static int rebirth(void) {
    for (int round = 0; round < 50; round++) {
        struct statx first, second;
        int fd = make("file");
        CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &first) == 0 && close(fd) == 0);
        fd = make("file");
        CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &second) == 0);
        if (first.stx_ino != second.stx_ino || first.stx_btime.tv_nsec != second.stx_btime.tv_nsec) continue;
        warm(fd);
        pid_t child = fork();
        if (child == 0) {
            int own = open("file", O_RDWR);
            warm(own);
            put(own, 0, 'N');
            _exit(0);
        }
        await(child);
        return compare(fd, 0);
    }
    return 0;
}

static int replaced, one, other;
static volatile int stops;

static void *replace(void *unused) {
    while (!stops) dup2(other, replaced), dup2(one, replaced);
    return unused;
}

/* Another thread lets a descriptor mean another file for a moment, while it is read and written. */
static int replacing(void) {
    int worst = 0;
    one = made_and_warm("one"), other = made_and_warm("other");
    for (int number = 0; number < PAGES; number++) put(other, number, (char)('a' + number));
    replaced = dup(one);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, replace, NULL) == 0);
    for (int round = 0; round < 2000; round++) {
        int number = round % PAGES;
        CHECK(pwrite(one, "A", 1, (off_t)number * PAGE) == 1 && pread(replaced, page, PAGE, (off_t)number * PAGE) == PAGE);
        if (round % 16 == 0) put(replaced, number, 'X');
        worst |= compare(one, number) | compare(other, number);
    }
    stops = 1;
    pthread_join(thread, NULL);
    return worst;
}

/* The child of a fork writes, and can open nothing. */
static int full_table(void) {
    int fd = made_and_warm("file");
    pid_t child = fork();
    if (child == 0) {
        while (dup(0) >= 0) {}
        put(fd, 0, 'N');
        _exit(0);
    }
    await(child);
    return compare(fd, 0);
}

static void *map(void *fd) { return mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, *(int *)fd, 0); }

static void *read_once(void *fd) {
    char byte;
    return pread(*(int *)fd, &byte, 1, 0) == 1 ? fd : NULL;
}

/* A mapping outlives the thread that has made it. */
static int mapping(void) {
    int fd = made_and_warm("file");
    pthread_t thread;
    void *mapped;
    CHECK(pthread_create(&thread, NULL, map, &fd) == 0 && pthread_join(thread, &mapped) == 0 && mapped != MAP_FAILED);
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&thread, NULL, read_once, &fd) == 0 && pthread_join(thread, NULL) == 0);
    warm(fd);
    memset(mapped, 'M', PAGE);
    return compare(fd, 0);
}

/* A file is mapped by a name outside of the directory. */
static int link_elsewhere(void) {
    int fd = made_and_warm("file");
    unlink("../edges-link");
    CHECK(link("file", "../edges-link") == 0);
    int elsewhere = open("../edges-link", O_RDWR);
    char *mapped = map(&elsewhere);
    CHECK(mapped != MAP_FAILED && unlink("../edges-link") == 0);
    mapped[0] = 'M';
    return compare(fd, 0);
}

/* A stream outlives the process that has opened it: this is how daemons are made. */
static int stream_in_child(void) {
    CHECK(close(make("file")) == 0);
    FILE *stream = fopen("file", "r+");
    pid_t child = fork();
    if (child == 0) {
        pid_t grandchild = fork();
        if (grandchild != 0) _exit(0);
        pause_ms(300);
        int fd = open("file", O_RDONLY);
        warm(fd);
        CHECK(fputs("hello", stream) > 0 && fflush(stream) == 0);
        int worst = compare(fd, 0);
        CHECK(syscall(SYS_pwrite64, open("result", O_WRONLY | O_CREAT, 0600), worst ? "old" : "new", 3, 0) == 3);
        _exit(0);
    }
    await(child);
    char result[4] = "";
    for (int round = 0; round < 500 && result[0] == 0; round++) {
        pause_ms(10);
        int fd = open("result", O_RDONLY);
        if (fd >= 0) CHECK(read(fd, result, 3) >= 0 && close(fd) == 0);
    }
    return strcmp(result, "new") == 0 ? 0 : OLD;
}

/* Standard output is a file that is cached. */
static int standard_output(void) {
    int fd = made_and_warm("file"), before = dup(STDOUT_FILENO), file = open("file", O_WRONLY);
    CHECK(dup2(file, STDOUT_FILENO) == STDOUT_FILENO && printf("hello") == 5 && fflush(stdout) == 0);
    CHECK(dup2(before, STDOUT_FILENO) == STDOUT_FILENO);
    return compare(fd, 0);
}

/* What `open` becomes if programs are hardened. */
static int hardened_open(void) {
    int fd = made_and_warm("file"), __open_2(const char *, int);
    CHECK(close(__open_2("file", O_WRONLY | O_TRUNC)) == 0);
    return compare(fd, 0);
}

/* Truncating by path gives up no lock, and a path that only names a file is opened as without the library. */
static int locks(void) {
    int fd = make("file");
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(fd, F_SETLK, &lock) == 0 && truncate("file", PAGES * PAGE) == 0);
    pid_t child = fork();
    if (child == 0) {
        struct flock found = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        CHECK(fcntl(open("file", O_RDWR), F_GETLK, &found) == 0 && found.l_type == F_WRLCK);
        _exit(0);
    }
    await(child);
    int named = open("file", O_PATH | O_WRONLY | O_TRUNC);
    CHECK(named >= 0 && close(named) == 0 && truncate("none", 0) < 0 && errno == ENOENT);
    return compare(fd, 0);
}

static int ends[2];

static void *fill_pipe(void *unused) {
    while (write(ends[1], page, PAGE) > 0) {}
    return unused;
}

/* A thread that waits in a write to a pipe can be cancelled, and a handler may write meanwhile. */
static void write_byte(int signal) {
    int errno_before = errno;
    if (write(ends[1], &signal, 1) < 0) errno = errno_before;
}

static int cancelled(void) {
    pthread_t thread;
    CHECK(pipe(ends) == 0 && pthread_create(&thread, NULL, fill_pipe, NULL) == 0);
    pause_ms(200);
    alarm(10);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    return 0;
}

/* Handlers that interrupt the allocator of libc make a thread's first calls. */
static int handlers(void) {
    CHECK(pipe2(ends, O_NONBLOCK) == 0);
    int log = open("log", O_WRONLY | O_CREAT, 0600);
    ends[1] = log;
    for (int round = 0; round < 300; round++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(10);
            signal(SIGPROF, write_byte);
            struct itimerval soon = {{0, 0}, {0, 100 + round % 100 * 10}};
            void *blocks[64] = {0};
            struct timespec start, now;
            clock_gettime(CLOCK_MONOTONIC, &start);
            CHECK(setitimer(ITIMER_PROF, &soon, NULL) == 0);
            for (int i = 0;; i++) {
                free(blocks[i % 64]);
                blocks[i % 64] = malloc(2000 + i % 30000);
                clock_gettime(CLOCK_MONOTONIC, &now);
                if ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 >= 5) _exit(0);
            }
        }
        await(child);
    }
    return 0;
}

/* The child of a `vfork` makes calls in its parent's memory. */
static int vforked(void) {
    CHECK(close(make("file")) == 0 && pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = open("file", O_RDWR);
        pid_t inner = vfork();
        if (inner == 0) _exit(write(ends[1], "x", 1) == 1 && pwrite(fd, "A", 1, 0) == 1 ? 0 : 1);
        await(inner);
        warm(fd);
        put(fd, 0, 'N');
        _exit(compare(fd, 0));
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static const struct {
    const char *name;
    int (*run)(void);
} edges[] = {
    {"foreign", foreign},     {"append", append},   {"rebirth", rebirth},
    {"replacing", replacing}, {"full-table", full_table}, {"mapping", mapping},
    {"link", link_elsewhere}, {"stream-in-child", stream_in_child}, {"standard-output", standard_output},
    {"hardened-open", hardened_open}, {"locks", locks}, {"cancelled", cancelled},
    {"handlers", handlers},   {"vforked", vforked},
};

int main(int arguments, char **argument) {
    CHECK(arguments == 3 && chdir(argument[1]) == 0);
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        if (strcmp(argument[2], edges[i].name) == 0) return edges[i].run();
    return 2;
}
