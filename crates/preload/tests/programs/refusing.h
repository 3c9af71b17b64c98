/* Makes the kernel refuse to read and write by position: calls that succeed from then on were served within the process. */
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <time.h>

enum { PATIENCE_S = 20, REFUSED = EUCLEAN };

static inline void refuse_positional_calls(void) {
#define REFUSE(call)                                                      \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1),                \
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | REFUSED)
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSE(pread64), REFUSE(pwrite64), REFUSE(preadv), REFUSE(pwritev), REFUSE(preadv2), REFUSE(pwritev2),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

static inline void await_acceleration(int fd) {
    char byte;
    time_t end = time(NULL) + PATIENCE_S;
    while (pread(fd, &byte, 1, 0) != 1) {
        CHECK(errno == REFUSED && time(NULL) < end);
        poll(NULL, 0, 5);
    }
}
