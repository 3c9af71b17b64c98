/* cached DIR SECONDS HOW: processes that read and write DIR/shared, and each a file of its own, through the page cache,
 * and read DIR/unchanged.
 *
 * Each block of the shared file is written by one process, all words alike: the block's number and a count. A reader must
 * find only words of that block, and none older than the last write that had ended before. HOW is `hooked`, or `foreign`:
 * then writes are made by system calls that no library sees, and the program must find old words. */
#include "common.h"

#include <time.h>

enum { PROCESSES = 4, BLOCKS = 32, WORDS = 1024, BLOCK = WORDS * 8, OWN_BLOCKS = 5 };

static volatile uint64_t *written;
static uint64_t state;
static int self, foreign, file, unchanged, own, rounds;
static char own_name[PATH_MAX];

static uint64_t count_of(uint64_t word) { return word & 0xffffffffffu; }

static void check_words(const uint64_t *words, int many, uint64_t block, uint64_t before) {
    for (int i = 0; i < many; i++) {
        CHECK(words[i] >> 40 == block + 1);
        if (count_of(words[i]) < before) {
            fprintf(stderr, "block %lu: found %lu after %lu was written\n", block, count_of(words[i]), before);
            _exit(3);
        }
    }
}

static void fill(uint64_t *words, uint64_t block, uint64_t count) {
    for (int i = 0; i < WORDS; i++) words[i] = (block + 1) << 40 | count;
}

static void read_shared(uint64_t *random) {
    uint64_t words[2 * WORDS], block = next_random(random) % (BLOCKS - 1);
    uint64_t before = __atomic_load_n(&written[block], __ATOMIC_ACQUIRE);
    uint64_t before_next = __atomic_load_n(&written[block + 1], __ATOMIC_ACQUIRE);
    off_t at = (off_t)(block * BLOCK);
    switch (next_random(random) % 4) {
    case 0: { /* a part of a block */
        CHECK(pread(file, words, BLOCK / 2, at + BLOCK / 4) == BLOCK / 2);
        check_words(words, WORDS / 2, block, before);
        break;
    }
    case 1: { /* two blocks, in pieces that do not fit them */
        struct iovec pieces[] = {{words, 3000}, {(char *)words + 3000, 2 * BLOCK - 3000}};
        CHECK(preadv(file, pieces, 2, at) == 2 * BLOCK);
        check_words(words, WORDS, block, before);
        check_words(words + WORDS, WORDS, block + 1, before_next);
        break;
    }
    default:
        CHECK(pread(file, words, BLOCK, at) == BLOCK);
        check_words(words, WORDS, block, before);
    }
}

static void write_shared(uint64_t *random) {
    uint64_t words[WORDS], block = next_random(random) % (BLOCKS / PROCESSES) * PROCESSES + self;
    uint64_t count = written[block] + 1;
    off_t at = (off_t)(block * BLOCK);
    fill(words, block, count);
    if (foreign) {
        CHECK(syscall(SYS_pwrite64, file, words, BLOCK, at) == BLOCK);
    } else {
        switch (next_random(random) % 4) {
        case 0: {
            struct iovec pieces[] = {{words, 5000}, {(char *)words + 5000, BLOCK - 5000}};
            CHECK(pwritev(file, pieces, 2, at) == BLOCK);
            break;
        }
        case 1: {
            int other = open(own_name, O_RDONLY); /* so that numbers mean different files */
            int again = open("shared", O_WRONLY);
            CHECK(other >= 0 && again >= 0 && lseek(again, at, SEEK_SET) == at);
            CHECK(write(again, words, BLOCK) == BLOCK && close(other) == 0 && close(again) == 0);
            break;
        }
        default:
            CHECK(pwrite(file, words, BLOCK, at) == BLOCK);
        }
    }
    __atomic_store_n(&written[block], count, __ATOMIC_RELEASE);
}

/* A file that nobody writes after the start. */
static void read_unchanged(uint64_t block) {
    uint64_t words[WORDS];
    CHECK(pread(unchanged, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
    check_words(words, WORDS, block, 0);
}

/* A file that only this process uses: what it reads is what it wrote last. */
static void use_own(uint64_t *random) {
    static uint64_t count, blocks, counts[OWN_BLOCKS];
    uint64_t words[WORDS], block = next_random(random) % OWN_BLOCKS;
    switch (next_random(random) % 12) {
    case 0:
        blocks = next_random(random) % (blocks + 1);
        CHECK(next_random(random) % 2 ? ftruncate(own, (off_t)(blocks * BLOCK)) == 0
                                      : truncate(own_name, (off_t)(blocks * BLOCK)) == 0);
        break;
    case 1: {
        int again = open(own_name, O_RDWR | O_TRUNC);
        CHECK(again >= 0 && close(own) == 0 && dup2(again, own) == own && close(again) == 0);
        blocks = 0;
        break;
    }
    case 2: { /* the name goes to a new file */
        CHECK(unlink(own_name) == 0);
        int again = open(own_name, O_RDWR | O_CREAT, 0600);
        CHECK(again >= 0 && dup2(again, own) == own && close(again) == 0);
        blocks = 0;
        break;
    }
    case 3: case 4: case 5:
        if (block <= blocks) {
            fill(words, block, ++count);
            CHECK(pwrite(own, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
            counts[block] = count;
            if (block == blocks) blocks++;
        }
        break;
    default: {
        ssize_t got = pread(own, words, BLOCK, (off_t)(block * BLOCK));
        CHECK(got == (block < blocks ? BLOCK : 0));
        if (got) check_words(words, WORDS, block, counts[block]);
        CHECK(!got || count_of(words[0]) == counts[block]);
    }
    }
}

static void *read_on(void *unused) {
    uint64_t random = state ^ 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 2000; i++) read_shared(&random);
    return unused;
}

static void work(int seconds) {
    time_t end = time(NULL) + seconds;
    while (time(NULL) < end) {
        for (int i = 0; i < 200; i++) {
            read_shared(&state);
            if (next_random(&state) % 4 == 0) write_shared(&state);
            use_own(&state);
            read_unchanged((uint64_t)i % BLOCKS);
        }
        if (++rounds % 8 == 0) { /* a child goes on with what its parent has */
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                for (int i = 0; i < 50; i++) read_shared(&state), write_shared(&state);
                _exit(0);
            }
            int status;
            CHECK(waitpid(child, &status, 0) == child);
            if (status) _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
        }
        if (rounds % 16 == 1) {
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, read_on, NULL) == 0 && pthread_join(thread, NULL) == 0);
        }
    }
}

int main(int arguments, char **argument) {
    CHECK(arguments == 4 && chdir(argument[1]) == 0);
    foreign = strcmp(argument[3], "foreign") == 0;
    written = mmap(NULL, BLOCKS * sizeof *written, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(written != MAP_FAILED);
    file = open("shared", O_RDWR | O_CREAT, 0600);
    unchanged = open("unchanged", O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && unchanged >= 0);
    for (uint64_t block = 0; block < BLOCKS; block++) {
        uint64_t words[WORDS];
        fill(words, block, 0);
        CHECK(pwrite(file, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
        CHECK(pwrite(unchanged, words, BLOCK, (off_t)(block * BLOCK)) == BLOCK);
    }
    pid_t children[PROCESSES];
    for (self = 0; self < PROCESSES; self++) {
        children[self] = fork();
        CHECK(children[self] >= 0);
        if (children[self] == 0) {
            state = 88172645463325252u + self;
            snprintf(own_name, sizeof own_name, "own-%d", self);
            own = open(own_name, O_RDWR | O_CREAT | O_TRUNC, 0600);
            CHECK(own >= 0);
            work(atoi(argument[2]));
            _exit(0);
        }
    }
    int worst = 0;
    for (int child = 0; child < PROCESSES; child++) {
        int status;
        CHECK(waitpid(children[child], &status, 0) == children[child]);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 100;
        if (code > worst) worst = code;
    }
    return worst;
}
