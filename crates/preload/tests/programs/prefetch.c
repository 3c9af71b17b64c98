/* prefetch DIR: asks the kernel to read a file ahead, overwrites the file without the kernel, and opens it through the
 * kernel. Reads there must return the new data: the kernel must have no older pages. */
#include "refusing.h"

enum { BYTES = 256 << 10, ROUNDS = 60, WAYS = 4 };

static char seen[BYTES], written[BYTES];

static void prefetch(int fd, int way) {
    switch (way) {
    case 0: CHECK(posix_fadvise(fd, 0, BYTES, POSIX_FADV_WILLNEED) == 0); break;
    case 1: CHECK(posix_fadvise64(fd, 0, 0, POSIX_FADV_WILLNEED) == 0); break;
    case 2: CHECK(readahead(fd, 0, BYTES) == 0); break;
    default: { /* by a copy that the library has not seen in use */
        int copy = dup(fd);
        CHECK(copy >= 0 && readahead(copy, 0, BYTES) == 0 && close(copy) == 0);
    }
    }
}

int main(int count_of, char **arguments) {
    CHECK(count_of == 2);
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/filled1", arguments[1]);
    int fd = filled(arguments[1], 1, 'a', BYTES);
    CHECK(pread(fd, seen, 1, 0) == 1);
    refuse_positional_calls();
    for (int round = 0; round < ROUNDS; round++) {
        await_acceleration(fd);
        prefetch(fd, round % WAYS);
        memset(written, 'a' + round % 26, BYTES);
        for (size_t at = 0; at < BYTES;) { /* one that is refused is tried again: a word was just being taken */
            long bytes = pwrite(fd, written + at, BYTES - at, (off_t)at);
            CHECK(bytes > 0 || errno == REFUSED);
            if (bytes > 0) at += (size_t)bytes;
            else await_acceleration(fd);
        }
        int other = open(name, O_RDONLY | O_CLOEXEC);
        CHECK(other >= 0);
        for (size_t at = 0; at < BYTES;) {
            long bytes = read(other, seen + at, BYTES - at);
            CHECK(bytes > 0);
            at += (size_t)bytes;
        }
        CHECK(memcmp(seen, written, BYTES) == 0);
        CHECK(close(other) == 0);
    }
    errno = 0;
    CHECK(posix_fadvise(fd, 0, -1, POSIX_FADV_WILLNEED) == EINVAL && errno == 0);
    CHECK(posix_fadvise(-1, 0, 0, POSIX_FADV_WILLNEED) == EBADF);
    CHECK(readahead(-1, 0, 1) == -1 && errno == EBADF);
    int only_writes = open(name, O_WRONLY | O_CLOEXEC);
    CHECK(readahead(only_writes, 0, 1) == -1 && errno == EBADF);
    return 0;
}
