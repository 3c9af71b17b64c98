/* The test programs share this file. They print their results; the tests compare these with and without the library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define CHECK(claim)                                                                        \
    do {                                                                                    \
        if (!(claim)) {                                                                     \
            fprintf(stderr, "%s:%d: failed: %s (errno %d)\n", __FILE__, __LINE__, #claim, errno); \
            _exit(1);                                                                       \
        }                                                                                   \
    } while (0)

/* Sets one limit of descriptors for all machines: guards have numbers from half of it. */
__attribute__((constructor)) static void limit_descriptors(void) {
    struct rlimit limit = {1024, 1024};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* A count of the stand-in; 0 without the stand-in. */
static inline uint64_t count(const char *name) {
    uint64_t (*function)(void) = (uint64_t (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, name);
    return function ? function() : 0;
}

static inline int stands_in(void) { return dlsym(RTLD_DEFAULT, "farpool_double_served") != NULL; }
static inline uint64_t served(void) { return count("farpool_double_served"); }
static inline uint64_t given_up(void) { return count("farpool_double_given_up"); }

/* How many descriptors lie where guards do. */
static inline int guards(void) {
    int found = 0;
    for (int fd = 500; fd < 700; fd++) found += syscall(SYS_fcntl, fd, F_GETFD) >= 0;
    return found;
}

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* A file whose bytes are all `fill`. */
static inline int filled(const char *dir, int number, char fill, size_t bytes) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/filled%d", dir, number);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    char *from = malloc(bytes);
    memset(from, fill, bytes);
    CHECK(write(fd, from, bytes) == (ssize_t)bytes);
    free(from);
    return fd;
}

static inline int is_all(const char *bytes, size_t count, char fill) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != fill) return 0;
    return 1;
}

static inline void await(pid_t child) {
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
