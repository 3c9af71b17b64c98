/* Files in far memory: create, open, read, write, close, delete (Li et al., SIGMOD 2016, table 2).
 *
 * Link with -lfarpool (pkg-config farpool). See farpool(3).
 *
 * Every function may be called from any thread, on any file, at the same time. The library checks each
 * handle: a handle that was closed, or was never given out, gives -EBADF. Handles are not valid in a child
 * made by fork(2), which must connect itself. A child that a `done` function forks must not return from that
 * function: it must call exec(3) or _exit(2). If it returns, the library ends it with abort(3).
 *
 * Functions that return int or ssize_t return a negative error number (-ENOENT, -ENOSPC, ...) when they fail.
 * farpool_last_error() then says in words what is wrong and how to fix it.
 */
#ifndef FARPOOL_H
#define FARPOOL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A connection to a pool of far memory, and the names of its files. Other connections have names of their
 * own. */
typedef struct farpool farpool;

/* An open file. */
typedef struct farpool_file farpool_file;

/* The address of the pool, and how to use it. Set all members that you do not need to zero. */
struct farpool_options {
    const char *broker;    /* HOST:PORT; NULL: what FARPOOL_BROKER says, else the pool of this user's `farpool up` */
    const char *tls_dir;   /* folder with ca.pem, cert.pem, key.pem; NULL: what FARPOOL_TLS_DIR says, else the certificates
                              of this user's `farpool up` if `broker` is its broker, else none: a broker on this host */
    const char *transport; /* "shm", "tcp", or "auto"; NULL: auto */
    uint64_t limit_bytes;  /* most memory to lease; 0: as much as the pool gives */
};

/* Connects. With NULL for `options`, all members have their defaults. The connection is freed by
 * farpool_disconnect(). */
int farpool_connect(const struct farpool_options *options, farpool **pool);

/* Waits for asynchronous operations, closes and deletes all files, and gives all memory back. Calls of other
 * threads that are in progress on the connection and its files still complete normally. NULL is allowed. */
void farpool_disconnect(farpool *pool);

/* Creates a file of `size` zero bytes and opens it. All its memory is leased at once, so that writing within
 * the size does not fail for lack of memory. -EEXIST: there is a file of that name. -ENOSPC: the pool is
 * full. */
int farpool_create(farpool *pool, const char *name, uint64_t size, farpool_file **file);

/* Opens a file. -ENOENT: there is no file of that name. */
int farpool_open(farpool *pool, const char *name, farpool_file **file);

/* Reads up to `bytes` bytes at `offset`; returns how many: fewer at the end of the file, 0 behind it. */
ssize_t farpool_read(farpool_file *file, void *buffer, size_t bytes, uint64_t offset);

/* Writes `bytes` bytes at `offset`, which may lie behind the end; returns how many: all, or fewer if an error
 * came after some. */
ssize_t farpool_write(farpool_file *file, const void *data, size_t bytes, uint64_t offset);

/* Reports the result of an asynchronous operation: the bytes read or written, or a negative error number. It
 * is called once, on a thread of the library. It may start operations, but must not wait for any: there,
 * farpool_close() returns -EDEADLK, and farpool_disconnect() does nothing. */
typedef void (*farpool_done)(void *context, ssize_t result);

/* Like farpool_read() and farpool_write(), but return at once. The buffer must stay valid until `done` is
 * called. -EAGAIN: too many operations are waiting; `done` will not be called. */
int farpool_read_async(farpool_file *file, void *buffer, size_t bytes, uint64_t offset, farpool_done done, void *context);
int farpool_write_async(farpool_file *file, const void *data, size_t bytes, uint64_t offset, farpool_done done,
                        void *context);

/* The file's size in bytes. */
int farpool_size(farpool_file *file, uint64_t *size);

/* Truncates the file, which gives memory back, or extends it with zeros. */
int farpool_resize(farpool_file *file, uint64_t size);

/* Closes the file; returns when all operations on it have ended. The handle is not valid any more. */
int farpool_close(farpool_file *file);

/* Deletes the name. The memory is given back once the file is not open any more. */
int farpool_delete(farpool *pool, const char *name);

/* The error message of the last failed call of this thread. Valid until the thread's next failed call. */
const char *farpool_last_error(void);

/* The library's version: MAJOR.MINOR.PATCH. */
const char *farpool_version(void);

#ifdef __cplusplus
}
#endif

#endif
