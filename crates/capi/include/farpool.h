/* Files in far memory: create, open, read, write, close, delete (Li et al., SIGMOD 2016, table 2).
 *
 * Link with -lfarpool (pkg-config farpool). See farpool(3).
 *
 * Every function may be called from any thread, on any file, at the same time. Handles are looked up, never followed:
 * one that was closed, or was never given out, is -EBADF. Nothing survives fork(2): a child connects anew.
 *
 * Functions that return int or ssize_t return a negative error number (-ENOENT, -ENOSPC, ...) when they fail;
 * farpool_last_error() then says in words what is wrong and what mends it.
 */
#ifndef FARPOOL_H
#define FARPOOL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A connection to a pool of far memory, and the names of its files. Other connections have names of their own. */
typedef struct farpool farpool;

/* An open file. */
typedef struct farpool_file farpool_file;

/* Where the pool is, and how to use it. Set everything that you do not need to zero. */
struct farpool_options {
    const char *broker;    /* HOST:PORT; NULL: what FARPOOL_BROKER says, else the pool of this user's `farpool up` */
    const char *tls_dir;   /* folder with ca.pem, cert.pem, key.pem; NULL: what FARPOOL_TLS_DIR says, else the certificates
                              of this user's `farpool up` if `broker` is its broker, else none: a broker on this host */
    const char *transport; /* "shm", "tcp", or "auto"; NULL: auto */
    uint64_t limit_bytes;  /* most memory to lease; 0: as much as the pool gives */
};

/* Connects. The connection is freed by farpool_disconnect(). */
int farpool_connect(const struct farpool_options *options, farpool **pool);

/* Waits for asynchronous operations, closes and deletes all files, and gives all memory back. What other threads are
 * doing with the connection and its files still ends as it would have. NULL is allowed. */
void farpool_disconnect(farpool *pool);

/* Creates a file of `size` zero bytes and opens it. All its memory is leased now, so that writing within the size
 * does not fail for want of memory. -EEXIST: there is one of that name. -ENOSPC: the pool is full. */
int farpool_create(farpool *pool, const char *name, uint64_t size, farpool_file **file);

/* Opens a file. -ENOENT: there is none of that name. */
int farpool_open(farpool *pool, const char *name, farpool_file **file);

/* Reads up to `bytes` bytes at `offset`; returns how many: fewer at the end of the file, 0 behind it. */
ssize_t farpool_read(farpool_file *file, void *buffer, size_t bytes, uint64_t offset);

/* Writes `bytes` bytes at `offset`, which may lie behind the end; returns how many: all, unless an error came after
 * some. */
ssize_t farpool_write(farpool_file *file, const void *data, size_t bytes, uint64_t offset);

/* What became of an asynchronous operation: the bytes read or written, or a negative error number. Called once, on a
 * thread of the library. It may start operations, but must not wait for any; farpool_close() answers -EDEADLK there, and
 * farpool_disconnect() does nothing. */
typedef void (*farpool_done)(void *context, ssize_t result);

/* As farpool_read() and farpool_write(), but return at once; the buffer must stay until `done` is called. -EAGAIN: too
 * many are under way, and `done` will not be called. */
int farpool_read_async(farpool_file *file, void *buffer, size_t bytes, uint64_t offset, farpool_done done, void *context);
int farpool_write_async(farpool_file *file, const void *data, size_t bytes, uint64_t offset, farpool_done done,
                        void *context);

/* The file's size in bytes. */
int farpool_size(farpool_file *file, uint64_t *size);

/* Cuts the file off, giving memory back, or makes it longer by zeros. */
int farpool_resize(farpool_file *file, uint64_t size);

/* Closes the file; returns when what is under way on it has ended. The handle is of no use any more. */
int farpool_close(farpool_file *file);

/* Deletes the name. The memory goes back once the file is not open any more. */
int farpool_delete(farpool *pool, const char *name);

/* What was wrong with the last call of this thread that failed, in words. Valid until its next call that fails. */
const char *farpool_last_error(void);

/* The library's version: MAJOR.MINOR.PATCH. */
const char *farpool_version(void);

#ifdef __cplusplus
}
#endif

#endif
