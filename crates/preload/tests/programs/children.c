/* children DIR: forks, spawned programs, and descriptors that reach them. Run as `children inherited FD FILL` it
 * checks what it has inherited. */
#include "common.h"

static const char *self;

static void expect(int fd, char fill) {
    char bytes[100];
    CHECK(pread(fd, bytes, sizeof bytes, 50) == sizeof bytes);
    CHECK(is_all(bytes, sizeof bytes, fill));
}

static void forks(const char *dir) {
    int fd = filled(dir, 20, 'f', 4096), other = filled(dir, 21, 'o', 4096);
    expect(fd, 'f');
    expect(other, 'o');
    uint64_t before = served();
    pid_t child = fork();
    if (child == 0) {
        expect(fd, 'f');
        CHECK(dup2(other, fd) == fd);
        expect(fd, 'o');
        pid_t grandchild = fork();
        if (grandchild == 0) {
            expect(fd, 'o');
            if (stands_in()) CHECK(served() >= before + 3);
            CHECK(close(fd) == 0 && close(other) == 0);
            if (stands_in()) CHECK(guards() == 0);
            CHECK(pread(fd, &before, 1, 0) == -1 && errno == EBADF);
            _exit(0);
        }
        await(grandchild);
        _exit(0);
    }
    await(child);
    child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); /* a fork that runs no handlers */
    if (child == 0) {
        expect(fd, 'f');
        if (stands_in()) CHECK(served() > before);
        _exit(0);
    }
    await(child);
    expect(fd, 'f');
    CHECK(close(fd) == 0 && close(other) == 0);
    if (stands_in()) CHECK(guards() == 0);
}

/* Copies that were made without the library's knowledge share the state of their description. */
static void copies(const char *dir) {
    int fd = filled(dir, 19, 'c', 4096), before = guards();
    expect(fd, 'c');
    int copy = (int)syscall(SYS_dup, fd), third = dup(fd), fourth = fcntl(fd, F_DUPFD_CLOEXEC, 40);
    CHECK(fourth >= 40);
    expect(copy, 'c'), expect(third, 'c'), expect(fourth, 'c');
    if (stands_in()) CHECK(guards() == before + 1);
    CHECK((fcntl(copy, F_GETFL) & O_DIRECT) == 0 && (fcntl(third, F_GETFL) & O_DIRECT) == 0);
    CHECK(close(fd) == 0 && close(third) == 0 && close(fourth) == 0);
    uint64_t calls = served();
    expect(copy, 'c');
    if (stands_in()) CHECK(served() == calls + 1);
    CHECK(close(copy) == 0);
    if (stands_in()) CHECK(guards() == before);
}

/* A `vfork` child closes and copies in its own table, with its parent's memory. */
static void vforks(const char *dir) {
    int fd = filled(dir, 22, 'v', 4096), other = filled(dir, 23, 'w', 4096);
    expect(fd, 'v');
    expect(other, 'w');
    uint64_t before = given_up(), calls = served();
    char number[16];
    snprintf(number, sizeof number, "%d", 9);
    pid_t child = vfork();
    if (child == 0) {
        close(fd);
        dup2(other, 9);
        execl(self, self, "inherited", number, "w", (char *)NULL);
        _exit(9);
    }
    await(child);
    if (stands_in()) CHECK(given_up() == before + 1); /* the copy went to the program */
    expect(fd, 'v');
    if (stands_in()) CHECK(served() == calls + 1);
    expect(other, 'w');
    CHECK(close(fd) == 0 && close(other) == 0);
    if (stands_in()) CHECK(guards() == 0);
}

static int spawn(posix_spawn_file_actions_t *actions, int number) {
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    char *arguments[] = {(char *)self, "inherited", text, "p", NULL};
    pid_t child;
    CHECK(posix_spawn(&child, self, actions, NULL, arguments, environ) == 0);
    await(child);
    return 0;
}

static void spawns(const char *dir) {
    int fd = filled(dir, 24, 'p', 4096), keeps = filled(dir, 25, 'k', 4096), open_fd = filled(dir, 26, 'p', 4096);
    expect(fd, 'p');
    expect(keeps, 'k');
    expect(open_fd, 'p');
    CHECK(fcntl(open_fd, F_SETFD, 0) == 0);
    uint64_t before = given_up();
    CHECK(spawn(NULL, open_fd) == 0);
    if (stands_in()) CHECK(given_up() == before + 1);
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, fd, 0) == 0);
    CHECK(spawn(&actions, 0) == 0);
    CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    if (stands_in()) CHECK(given_up() == before + 2);
    CHECK(system("exit 0") == 0);
    FILE *stream = popen("exit 0", "r");
    CHECK(stream && pclose(stream) == 0);
    uint64_t calls = served();
    expect(keeps, 'k');
    if (stands_in()) CHECK(served() == calls + 1 && given_up() == before + 2);
    CHECK(close(fd) == 0 && close(keeps) == 0 && close(open_fd) == 0);
}

static void many_arguments(void) {
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", "test $0$1$2$3$4$5$6$7$8 = 012345678", "0", "1", "2", "3", "4", "5", "6", "7", "8",
              (char *)NULL);
        _exit(9);
    }
    await(child);
    child = fork();
    if (child == 0) {
        char *environment[] = {"WORD=yes", NULL};
        execle("/bin/sh", "sh", "-c", "test $WORD$1$2$3$4 = yes1234", "0", "1", "2", "3", "4", (char *)NULL, environment);
        _exit(9);
    }
    await(child);
    child = fork();
    if (child == 0) {
        execlp("sh", "sh", "-c", "test $1 = 1", "0", "1", (char *)NULL);
        _exit(9);
    }
    await(child);
    CHECK(execl("/nowhere", "nowhere", (char *)NULL) == -1 && errno == ENOENT);
}

static void passed_over_a_socket(const char *dir) {
    int fd = filled(dir, 27, 'q', 4096), pair[2];
    expect(fd, 'q');
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    char byte = 0, control[CMSG_SPACE(sizeof fd)];
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    uint64_t before = given_up();
    CHECK(sendmsg(pair[0], &message, 0) == 1);
    if (stands_in()) CHECK(given_up() == before + 1);
    CHECK(recvmsg(pair[1], &message, 0) == 1);
    int got;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
    expect(got, 'q');
    CHECK((fcntl(got, F_GETFL) & O_DIRECT) == 0);
    CHECK(close(fd) == 0 && close(got) == 0 && close(pair[0]) == 0 && close(pair[1]) == 0);
}

static void everything_is_closed(const char *dir) {
    int fd = filled(dir, 28, 'r', 4096), other = filled(dir, 29, 's', 4096);
    expect(fd, 'r');
    expect(other, 's');
    pid_t child = fork();
    if (child == 0) {
        CHECK(close_range(3, ~0u, 0) == 0);
        if (stands_in()) CHECK(guards() == 0);
        char byte;
        CHECK(pread(fd, &byte, 1, 0) == -1 && errno == EBADF);
        int again = filled(dir, 30, 't', 4096);
        CHECK(again == 3);
        expect(again, 't');
        closefrom(3);
        again = filled(dir, 31, 'u', 4096);
        CHECK(again == 3);
        expect(again, 'u');
        for (int number = 3; number < 1024; number++) close(number); /* guards and all */
        again = filled(dir, 32, 'x', 4096);
        expect(again, 'x');
        _exit(0);
    }
    await(child);
    CHECK(close_range((unsigned)fd, (unsigned)fd, CLOSE_RANGE_CLOEXEC) == 0);
    uint64_t calls = served();
    expect(fd, 'r');
    expect(other, 's');
    if (stands_in()) CHECK(served() == calls + 2);
    CHECK(close(fd) == 0 && close(other) == 0);
}

static void close_above(unsigned fd, int how) {
    switch (how) {
    case 0: CHECK(close_range(fd + 1, ~0u, 0) == 0); break;
    case 1: CHECK(syscall(SYS_close_range, fd + 1, ~0u, 0) == 0); break;
    case 2: closefrom((int)fd + 1); break;
    default: for (int number = (int)fd + 1; number < 4096; number++) close(number);
    }
}

/* Closing all descriptors also closes the library's own, again and again. Not with the stand-in, whose
 * descriptors would be closed, too. */
static void everything_is_closed_again_and_again(const char *dir) {
    if (stands_in()) return;
    int fd = filled(dir, 33, 'y', 4096);
    for (int round = 0; round < 40; round++) {
        expect(fd, 'y');
        close_above((unsigned)fd, round % 4);
        expect(fd, 'y');
        int other = filled(dir, 34, 'z', 4096);
        expect(other, 'z');
        CHECK(close(other) == 0);
    }
    CHECK(close(fd) == 0);
}

/* Closing any descriptor of a file drops its record locks, so the library must not close a guard. */
static void record_locks_stay(const char *dir) {
    int fd = filled(dir, 33, 'l', 4096);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10};
    CHECK(fcntl(fd, F_SETLK, &lock) == 0);
    expect(fd, 'l');
    CHECK(syscall(SYS_close, fd) == 0); /* and with it the lock; the guard is still there */
    CHECK(filled(dir, 33, 'm', 4096) == fd);
    CHECK(fcntl(fd, F_SETLK, &lock) == 0);
    expect(fd, 'm'); /* finds that the number means something else */
    pid_t child = fork();
    if (child == 0) {
        struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10};
        CHECK(fcntl(fd, F_GETLK, &asked) == 0);
        CHECK(asked.l_type == F_WRLCK);
        _exit(0);
    }
    await(child);
    CHECK(close(fd) == 0);
    if (stands_in()) CHECK(guards() == 0);
}

/* After the stand-in has ended, the kernel serves the calls. */
static void the_mount_dies(const char *dir) {
    int fd = filled(dir, 34, 'd', 4096);
    expect(fd, 'd');
    void (*die)(void) = (void (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, "farpool_double_die");
    if (die) die();
    uint64_t calls = served();
    expect(fd, 'd');
    CHECK(served() == calls);
    CHECK(close(fd) == 0);
}

/* After a fault of the library, the program continues without it. */
static void the_library_fails(const char *dir) {
    int fd = filled(dir, 35, 'e', 4096);
    expect(fd, 'e');
    pid_t child = fork();
    if (child == 0) {
        void (*fail)(void) = (void (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, "farpool_double_fail");
        if (fail) fail();
        uint64_t calls = served();
        expect(fd, 'e');
        expect(fd, 'e');
        CHECK(served() == calls);
        CHECK(close(fd) == 0);
        _exit(0);
    }
    await(child);
    CHECK(close(fd) == 0);
}

int main(int count_of, char **arguments) {
    if (count_of == 4 && strcmp(arguments[1], "inherited") == 0) {
        int fd = atoi(arguments[2]);
        expect(fd, arguments[3][0]);
        CHECK((fcntl(fd, F_GETFL) & O_DIRECT) == 0);
        return 0;
    }
    CHECK(count_of == 2);
    self = "/proc/self/exe";
    const char *dir = arguments[1];
    copies(dir);
    forks(dir);
    vforks(dir);
    spawns(dir);
    many_arguments();
    passed_over_a_socket(dir);
    everything_is_closed(dir);
    everything_is_closed_again_and_again(dir);
    record_locks_stay(dir);
    the_library_fails(dir);
    the_mount_dies(dir);
    return 0;
}
