/* sequence DIR SEED STEPS: random calls on a few files; prints what each of them answered. */
#include "common.h"

enum { FILES = 4, OPEN_MAX_HERE = 16, BUFFER = 12000 };

static uint64_t state;
static const char *dir;
static int fds[OPEN_MAX_HERE];

static uint64_t below(uint64_t end) { return next_random(&state) % end; }

static uint64_t hash(const char *bytes, size_t count) {
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < count; i++) sum = (sum ^ (unsigned char)bytes[i]) * 1099511628211u;
    return sum;
}

static void report(int step, const char *call, long answer, const char *bytes, size_t count) {
    int error = answer < 0 ? errno : 0;
    printf("%d %s %ld %d %llx\n", step, call, answer, error, (unsigned long long)(count ? hash(bytes, count) : 0));
}

/* Mostly an open descriptor, sometimes an unused number. */
static int some_fd(void) { return below(40) == 0 ? 300 + (int)below(200) : fds[below(OPEN_MAX_HERE)]; }

static off_t some_offset(void) { return below(30) == 0 ? -1 - (off_t)below(3) : (off_t)below(40000); }

static int open_one(void) {
    static const int access[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR, O_RDWR};
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/file%d", dir, (int)below(FILES));
    int flags = access[below(5)] | O_CREAT | (below(20) == 0 ? O_APPEND : 0) | (below(2) ? O_CLOEXEC : 0);
    return open(name, flags, 0600);
}

static int close_one(int fd) {
    FILE *stream;
    switch (below(5)) {
    case 0: return (int)syscall(SYS_close, fd);
    case 1: return close_range((unsigned)fd, (unsigned)fd, 0);
    case 2:
        stream = fd < 0 ? NULL : fdopen(fd, "r");
        return stream ? fclose(stream) : close(fd);
    default: return close(fd);
    }
}

static long one_read(int fd, char *to, size_t bytes, off_t offset) {
    struct iovec pieces[3] = {{to, bytes / 3}, {to + bytes / 3, bytes / 3}, {to + 2 * (bytes / 3), bytes % 3}};
    struct iovec overlapping[3] = {{to, bytes / 3}, {to + bytes / 6, bytes / 3}, {to + bytes / 12, bytes / 4}};
    switch (below(9)) {
    case 8: return preadv(fd, overlapping, 3, offset);
    case 0: return preadv(fd, pieces, 3, offset);
    case 1: return preadv2(fd, pieces, 3, offset, below(2) ? 0 : RWF_HIPRI);
    case 2: return preadv64(fd, pieces, (int)below(5) - 1 > 3 ? 3 : (int)below(4), offset);
    case 3: return pread64(fd, to, bytes, offset);
    case 4: return preadv64v2(fd, pieces, 3, offset, 0);
    default: return pread(fd, to, bytes, offset);
    }
}

static long one_write(int fd, char *from, size_t bytes, off_t offset) {
    struct iovec pieces[3] = {{from, bytes / 3}, {from + bytes / 3, bytes / 3}, {from + 2 * (bytes / 3), bytes % 3}};
    struct iovec overlapping[3] = {{from, bytes / 3}, {from + bytes / 6, bytes / 3}, {from + bytes / 12, bytes / 4}};
    switch (below(9)) {
    case 8: return pwritev(fd, overlapping, 3, offset);
    case 0: return pwritev(fd, pieces, 3, offset);
    case 1: return pwritev2(fd, pieces, 3, offset, below(10) ? 0 : RWF_APPEND);
    case 2: return pwritev64(fd, pieces, (int)below(4), offset);
    case 3: return pwrite64(fd, from, bytes, offset);
    case 4: return pwritev64v2(fd, pieces, 3, offset, 0);
    default: return pwrite(fd, from, bytes, offset);
    }
}

/* Each number is in one slot at most. The output does not depend on which numbers are used. */
static int copy_one(int slot) {
    int old = some_fd(), into = fds[slot], new = -1;
    switch (into < 0 ? 3 : below(4)) {
    case 0: new = dup2(old, into); break;
    case 1: new = old == into ? dup2(old, into) : dup3(old, into, O_CLOEXEC); break;
    case 2:
        close(into), fds[slot] = -1;
        new = dup(old);
        break;
    default:
        if (into >= 0) close(into), fds[slot] = -1;
        new = fcntl(old, F_DUPFD, (int)below(50));
    }
    if (new >= 0) fds[slot] = new;
    return new;
}

static long read_in_child(int fd, char *to, size_t bytes, off_t offset) {
    fflush(stdout);
    pread(fd, to, 1, 0); /* a description that only the child knows would show `O_DIRECT` here */
    pid_t child = below(3) ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        long answer = one_read(fd, to, bytes, offset);
        long second = one_read(fd, to, bytes, offset);
        _exit((int)((unsigned)(answer < 0 ? errno : (long)(hash(to, (size_t)answer) & 63)) ^ (unsigned)(second & 1)));
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static long first_byte_mapped(int fd) {
    off_t size = lseek(fd, 0, SEEK_END);
    if (size <= 0) return size;
    unsigned char *at = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return -1;
    long first = *at;
    munmap(at, 1);
    return first;
}

/* The library's connections take numbers as well, so the output only shows whether the call returned one. */
static int made(int fd) { return fd < 0 ? fd : 0; }

static void step(int number) {
    static char buffer[BUFFER];
    int slot = (int)below(OPEN_MAX_HERE), fd = some_fd();
    size_t bytes = below(BUFFER);
    off_t offset = some_offset();
    long answer;
    errno = 0;
    switch (below(16)) {
    case 0: case 1:
        if (fds[slot] >= 0) report(number, "close", close_one(fds[slot]), NULL, 0);
        report(number, "open", made(fds[slot] = open_one()), NULL, 0);
        break;
    case 2: report(number, "copy", made(copy_one(slot)), NULL, 0); break;
    case 3: case 4: case 5: case 6:
        for (size_t i = 0; i < bytes; i++) buffer[i] = (char)next_random(&state);
        report(number, "write", one_write(fd, buffer, bytes, offset), NULL, 0);
        break;
    case 7: report(number, "getfl", fcntl(fd, F_GETFL), NULL, 0); break;
    case 8:
        report(number, "setfl", fcntl(fd, F_SETFL, (below(8) ? 0 : O_APPEND) | (below(3) ? 0 : O_DIRECT)), NULL, 0);
        break;
    case 9: report(number, "truncate", ftruncate(fd, (off_t)below(40000)), NULL, 0); break;
    case 10:
        if (below(4) == 0) report(number, "map", first_byte_mapped(fd), NULL, 0);
        break;
    case 11:
        if (below(4) == 0) report(number, "child", read_in_child(fd, buffer, bytes, offset), NULL, 0);
        break;
    case 12: report(number, "null", pread(fd, NULL, below(2), offset), NULL, 0); break;
    case 13: {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
        report(number, "lock", fcntl(fd, F_SETLK, &lock), NULL, 0);
        break;
    }
    default:
        memset(buffer, 0, sizeof buffer);
        answer = one_read(fd, buffer, bytes, offset);
        report(number, "read", answer, buffer, bytes);
    }
}

int main(int count_of, char **arguments) {
    CHECK(count_of == 4);
    dir = arguments[1];
    state = strtoull(arguments[2], NULL, 10) * 2654435761u + 88172645463325252u;
    for (int i = 0; i < OPEN_MAX_HERE; i++) fds[i] = open_one();
    int steps = atoi(arguments[3]);
    for (int i = 0; i < steps; i++) step(i);
    if (stands_in()) CHECK(served() > (uint64_t)steps / 20);
    return 0;
}
