/* unaided DIR: reads and writes by position while the kernel refuses such calls, so calls that succeed were served within the
 * process. Exits with success if nearly all calls were, and the library has taken no low descriptor. */
#include "refusing.h"

enum { BYTES = 1 << 20, ROUNDS = 4000, LONGEST = 40000 };

static unsigned char model[BYTES], seen[LONGEST];

/* Descriptors where programs expect their own. */
static int low_descriptors(void) {
    int open = 0;
    for (int fd = 0; fd < 512; fd++) open += fcntl(fd, F_GETFD) >= 0;
    return open;
}

/* Single failures are left out (for example, because the lock of a block was just being taken). */
static int served_here(long answer, size_t bytes) {
    if (answer < 0) CHECK(errno == REFUSED);
    else CHECK((size_t)answer == bytes);
    return answer >= 0;
}

static int one_round(int fd, uint64_t *state) {
    size_t bytes = 1 + next_random(state) % LONGEST, at = next_random(state) % (BYTES - bytes);
    struct iovec pieces[2] = {{seen, bytes / 2}, {seen + bytes / 2, bytes - bytes / 2}};
    int two = bytes > 1 && next_random(state) % 2;
    if (next_random(state) % 2) {
        long answer = two ? preadv2(fd, pieces, 2, (off_t)at, 0) : pread(fd, seen, bytes, (off_t)at);
        if (!served_here(answer, bytes)) return 0;
        CHECK(memcmp(seen, model + at, bytes) == 0);
        return 1;
    }
    for (size_t i = 0; i < bytes; i++) seen[i] = (unsigned char)next_random(state);
    long answer = two ? pwritev(fd, pieces, 2, (off_t)at) : pwrite(fd, seen, bytes, (off_t)at);
    if (!served_here(answer, bytes)) return 0;
    memcpy(model + at, seen, bytes);
    return 1;
}

int main(int count_of, char **arguments) {
    CHECK(count_of == 2);
    int fd = filled(arguments[1], 50, 'z', BYTES);
    memset(model, 'z', BYTES);
    int before = low_descriptors();
    CHECK(pread(fd, seen, 1, 0) == 1);
    refuse_positional_calls();
    await_acceleration(fd);
    uint64_t state = 424242;
    int here = 0;
    for (int i = 0; i < ROUNDS; i++) here += one_round(fd, &state);
    CHECK(here > ROUNDS * 9 / 10);
    CHECK(low_descriptors() == before);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    for (size_t at = 0; at < BYTES; at += LONGEST / 2) { /* by the kernel, which must agree */
        long bytes = read(fd, seen, LONGEST / 2);
        CHECK(bytes > 0 && memcmp(seen, model + at, (size_t)bytes) == 0);
    }
    return 0;
}
