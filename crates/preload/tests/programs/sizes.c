/* sizes DIR CHECKS WAY: asks for the size of a file in every way while the file grows. No answer may be older than the size
 * that was acknowledged before the question.
 *
 *   apart     five processes with an opening each: two append in turns, the others ask (lseek, pread, stat by the path)
 *   together  one process with a single opening, by which its threads append and ask; a second process asks by the path.
 *             Each round has a new file, and the first question comes at any moment of its growth
 *
 * CHECKS is how many questions are asked at least. It prints how many were, and how many answers were wrong. */
#include "common.h"
#include <sched.h>

enum { PAGE = 8192, MOST = 512 };

/* The acknowledged size: the upper half is the generation, odd while the file is truncated; the lower half is in pages. */
static uint64_t generation_of(uint64_t word) { return word >> 32; }
static uint64_t pages_of(uint64_t word) { return word & 0xffffffff; }

static struct shared {
    volatile uint64_t turn, acknowledged, checks, wrong, end, opened, asking;
} *shared;

static uint64_t least;
static char path[PATH_MAX];

static void fail(const char *how, uint64_t before, uint64_t answer) {
    fprintf(stderr, "%s: %llu, of %llu pages\n", how, (unsigned long long)answer, (unsigned long long)pages_of(before));
    __atomic_add_fetch(&shared->wrong, 1, __ATOMIC_SEQ_CST);
}

static uint64_t acknowledged(void) { return __atomic_load_n(&shared->acknowledged, __ATOMIC_SEQ_CST); }
static void acknowledge(uint64_t word) { __atomic_store_n(&shared->acknowledged, word, __ATOMIC_SEQ_CST); }

static int has_ended(void) { return shared->end || shared->wrong; }

/* Checks the size that a call returned. The file was at least as long as `before` says, and may now be one page longer than
 * `after`. */
static void judge(const char *how, uint64_t before, int64_t bytes) {
    uint64_t after = acknowledged();
    if (generation_of(before) != generation_of(after) || generation_of(before) % 2) return;
    if (bytes < (int64_t)(pages_of(before) * PAGE) || bytes > (int64_t)((pages_of(after) + 1) * PAGE)) fail(how, before, bytes);
    if (__atomic_add_fetch(&shared->checks, 1, __ATOMIC_SEQ_CST) >= least) shared->end = 1;
}

static void ask_end(int fd) {
    uint64_t before = acknowledged();
    judge("lseek", before, lseek(fd, 0, SEEK_END));
}

static void ask_stat(int fd) {
    struct stat facts;
    uint64_t before = acknowledged();
    if (fd < 0 ? stat(path, &facts) : fstat(fd, &facts)) return; /* between two rounds */
    judge(fd < 0 ? "stat" : "fstat", before, facts.st_size);
}

/* The last page that was acknowledged, directly and by the kernel. */
static void ask_page(int fd, int by_kernel) {
    static __thread uint64_t page[PAGE / 8] __attribute__((aligned(4096)));
    uint64_t before = acknowledged();
    if (generation_of(before) % 2 || !pages_of(before)) return;
    off_t at = (off_t)((pages_of(before) - 1) * PAGE);
    page[1] = 0;
    long bytes = by_kernel ? syscall(SYS_pread64, fd, page, PAGE, at) : pread(fd, page, PAGE, at);
    if (generation_of(acknowledged()) != generation_of(before)) return;
    if (bytes == PAGE && page[1] == pages_of(before) - 1) bytes = at + PAGE;
    judge(by_kernel ? "read" : "pread", before, bytes);
}

static void ask_map(int fd) {
    uint64_t before = acknowledged();
    if (generation_of(before) % 2 || !pages_of(before)) return;
    off_t at = (off_t)((pages_of(before) - 1) * PAGE);
    volatile uint64_t *page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, at);
    CHECK(page != MAP_FAILED);
    judge("mmap", before, page[1] == pages_of(before) - 1 ? at + PAGE : 0); /* or SIGBUS */
    munmap((void *)page, PAGE);
}

static void append(int fd) {
    static __thread uint64_t page[PAGE / 8];
    uint64_t word = acknowledged();
    page[1] = pages_of(word);
    CHECK(pwrite(fd, page, PAGE, (off_t)(pages_of(word) * PAGE)) == PAGE);
    acknowledge(word + 1);
}

/* Makes a positional call: a descriptor without one is not registered, and ends acceleration of the file for all. */
static int open_registered(void) {
    char byte;
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, 0) >= 0);
    return fd;
}

/* One of the processes that write in turns. */
static void write_in_turns(uint64_t self) {
    int fd = open_registered();
    while (!has_ended()) {
        if (__atomic_load_n(&shared->turn, __ATOMIC_SEQ_CST) != self) {
            sched_yield();
            continue;
        }
        append(fd);
        uint64_t word = acknowledged();
        if (pages_of(word) == MOST) {
            acknowledge(word + (1ull << 32));
            CHECK(ftruncate(fd, 0) == 0);
            acknowledge((generation_of(word) + 2) << 32);
        }
        __atomic_store_n(&shared->turn, 1 - self, __ATOMIC_SEQ_CST);
    }
}

static void ask_apart(int way) {
    int fd = way == 2 ? -1 : open_registered();
    while (!has_ended()) {
        if (way == 0) ask_end(fd);
        if (way == 1) ask_page(fd, 0), ask_page(fd, 1);
        if (way == 2) ask_stat(-1);
    }
}

static pid_t begin(void (*work)(int), int way) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child) return child;
    work(way);
    _exit(0);
}

static void join(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void write_apart(int way) {
    write_in_turns(way - 3);
}

static void apart(void) {
    pid_t children[5];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    for (int way = 0; way < 5; way++) children[way] = way < 3 ? begin(ask_apart, way) : begin(write_apart, way);
    for (int way = 0; way < 5; way++) join(children[way]);
}

static uint64_t state = 88172645463325252u;
static volatile int current;

static void ask_by_path(int way) {
    (void)way;
    while (!has_ended()) ask_stat(-1), sched_yield();
}

/* A thread that asks by the single opening, from some moment of the file's growth on. */
static void *ask_together(void *nothing) {
    (void)nothing;
    for (uint64_t round = 0; !has_ended(); round++) {
        uint64_t word = acknowledged(), from = next_random(&state) % (2 * MOST);
        while (!has_ended() && generation_of(acknowledged()) == generation_of(word)) {
            if (generation_of(word) % 2 || pages_of(acknowledged()) < from) {
                sched_yield();
                continue;
            }
            __atomic_add_fetch(&shared->asking, 1, __ATOMIC_SEQ_CST);
            if (generation_of(acknowledged()) == generation_of(word)) {
                int fd = current;
                if (round % 8 == 7) ask_map(fd);
                else if (round % 4 == 0) ask_end(fd);
                else if (round % 4 == 1) ask_page(fd, 1);
                else if (round % 4 == 2) ask_stat(fd);
                ask_end(fd), ask_page(fd, 0), ask_page(fd, 1), ask_stat(fd);
            }
            __atomic_sub_fetch(&shared->asking, 1, __ATOMIC_SEQ_CST);
        }
    }
    return NULL;
}

static void together(void) {
    unlink(path);
    acknowledge(1ull << 32);
    pthread_t asking;
    pid_t child = begin(ask_by_path, 0);
    CHECK(pthread_create(&asking, NULL, ask_together, NULL) == 0);
    for (uint64_t round = 0; !has_ended(); round++) {
        current = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
        CHECK(current >= 0);
        acknowledge((2 * round + 2) << 32);
        for (int pages = 0; pages < MOST && !has_ended(); pages++) append(current);
        acknowledge((2 * round + 3) << 32);
        while (__atomic_load_n(&shared->asking, __ATOMIC_SEQ_CST)) sched_yield();
        CHECK(close(current) == 0 && unlink(path) == 0);
    }
    CHECK(pthread_join(asking, NULL) == 0);
    join(child);
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    snprintf(path, sizeof path, "%s/sizes", arguments[1]);
    least = strtoull(arguments[2], NULL, 10);
    if (strcmp(arguments[3], "apart") == 0) apart();
    else together();
    printf("%llu asked, %llu wrong\n", (unsigned long long)shared->checks, (unsigned long long)shared->wrong);
    return shared->wrong != 0;
}
