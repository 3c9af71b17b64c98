/* stress DIR ROLE ID CONTROL: one of several processes that work on DIR/shared until they are told to end.
 *
 * Each block is written by one process, all words alike: the block's number and a count. A reader must find only words of
 * that block, and none older than the last write that finished before. No finished write may be lost when a process is
 * killed.
 *
 *   keeping    has the file open all the time
 *   reopening  opens it anew, now and then
 *   mapping    opens it anew, maps it, and reads it there
 *
 * Data that a process writes through the kernel's pages can be read before the mount has them, and are lost if the process is
 * killed before it has. So in such blocks readers expect only finished writes; in all others also data that they once read.
 *
 * CONTROL is a file with these words: one that ends the processes; for each process its progress, and whether it writes
 * through the kernel's pages; and for each block the count that was last written. */
#include "common.h"

enum { PROCESSES = 6, BLOCKS = 24, WORDS = 1024, BLOCK = WORDS * 8, STRETCH = 40 };

struct control {
    volatile uint64_t end, progress[PROCESSES], by_pages[PROCESSES], written[BLOCKS];
};

static struct control *control;
static uint64_t state, newest[BLOCKS];
static const char *role;
static char name[PATH_MAX];
static int self;

static uint64_t count_of(uint64_t word) { return word & 0xffffffffffu; }

/* The oldest and the newest count in a block. */
static void look(const volatile uint64_t *words, uint64_t block, uint64_t *oldest, uint64_t *latest) {
    *oldest = UINT64_MAX, *latest = 0;
    for (int i = 0; i < WORDS; i++) {
        uint64_t word = words[i], count = count_of(word);
        CHECK(word == 0 || word >> 40 == block + 1);
        if (count < *oldest) *oldest = count;
        if (count > *latest) *latest = count;
    }
}

static void read_one(int fd, const uint64_t *map) {
    static uint64_t words[WORDS];
    uint64_t block = next_random(&state) % BLOCKS, before = control->written[block], oldest, latest;
    if (map) {
        look(map + block * WORDS, block, &oldest, &latest);
    } else {
        CHECK(pread(fd, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
        look(words, block, &oldest, &latest);
    }
    CHECK(oldest >= before);
    CHECK(oldest >= newest[block] || control->by_pages[block % PROCESSES]);
    newest[block] = oldest;
}

static void write_one(int fd) {
    static uint64_t words[WORDS], seen[WORDS];
    uint64_t block = (uint64_t)self + PROCESSES * (next_random(&state) % (BLOCKS / PROCESSES));
    uint64_t word = (block + 1) << 40 | (newest[block] + 1);
    for (int i = 0; i < WORDS; i++) words[i] = word;
    CHECK(pwrite(fd, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
    newest[block]++;
    control->written[block] = newest[block];
    CHECK(pread(fd, seen, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
    CHECK(memcmp(words, seen, BLOCK) == 0);
}

static void a_stretch(int fd, const uint64_t *map) {
    for (int i = 0; i < STRETCH && !control->end; i++) {
        read_one(fd, map);
        write_one(fd);
        control->progress[self]++;
    }
}

static int open_it(void) {
    int fd = open(name, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

/* A predecessor may have been killed while it wrote: then some words are newer than others. */
static void take_over(int fd) {
    static uint64_t words[WORDS];
    for (uint64_t block = (uint64_t)self; block < BLOCKS; block += PROCESSES) {
        uint64_t oldest, latest;
        CHECK(pread(fd, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
        look(words, block, &oldest, &latest);
        CHECK(oldest >= control->written[block] && latest <= control->written[block] + 1);
        newest[block] = latest;
    }
}

int main(int arguments_count, char **arguments) {
    CHECK(arguments_count == 5);
    snprintf(name, sizeof name, "%s/shared", arguments[1]);
    role = arguments[2], self = atoi(arguments[3]);
    state = 77777u + (uint64_t)self * 1000003u + (uint64_t)getpid();
    int at = open(arguments[4], O_RDWR | O_CLOEXEC);
    CHECK(at >= 0);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, at, 0);
    CHECK(control != MAP_FAILED);
    control->by_pages[self] = !getenv("LD_PRELOAD") || strcmp(role, "mapping") == 0;
    int fd = open_it();
    take_over(fd);
    while (!control->end) {
        const uint64_t *map = NULL;
        if (strcmp(role, "keeping") != 0) {
            CHECK(close(fd) == 0);
            usleep(20000); /* so that the file is open to the others for a while */
            fd = open_it();
        }
        if (strcmp(role, "mapping") == 0) {
            map = mmap(NULL, BLOCKS * BLOCK, PROT_READ, MAP_SHARED, fd, 0);
            CHECK(map != MAP_FAILED);
        }
        a_stretch(fd, map);
        if (map) CHECK(munmap((void *)map, BLOCKS * BLOCK) == 0);
    }
    return 0;
}
