/* A disk that fails below LMDB, which makes its calls without the store's Env: preloaded into a process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* 0: nothing, 1: writes fail, 2: writes are short, 3: syncs fail, 4: reads fail. */
static volatile int kind, error, skip;

/* Let calls of a kind fail with this errno, but not the first `at`; a kind of 0 ends that. */
void below(int which, int number, int at) {
    error = number;
    skip = at;
    kind = which;
}

static int hits(int fd, int which) {
    char link[32], path[4096];
    if (kind != which) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path);
    if (size < 8 || memcmp(path + size - 8, "data.mdb", 8)) return 0;
    return __sync_fetch_and_sub(&skip, 1) <= 0;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL do { errno = error; return -1; } while (0)

#define WRITE(name)                                                           \
    ssize_t name(int fd, const void *data, size_t size, off_t at) {           \
        if (hits(fd, 1)) FAIL;                                                \
        if (size > 1 && hits(fd, 2)) size /= 2;                               \
        return NEXT(name)(fd, data, size, at);                                \
    }
WRITE(pwrite)
WRITE(pwrite64)

#define WRITEV(name)                                                          \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) {    \
        if (hits(fd, 1)) FAIL;                                                \
        if (count > 1 && hits(fd, 2)) count /= 2;                             \
        return NEXT(name)(fd, parts, count, at);                              \
    }
WRITEV(pwritev)
WRITEV(pwritev64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (hits(fd, 1)) FAIL;
    if (count > 1 && hits(fd, 2)) count /= 2;
    return NEXT(writev)(fd, parts, count);
}

ssize_t write(int fd, const void *data, size_t size) {
    if (hits(fd, 1)) FAIL;
    if (size > 1 && hits(fd, 2)) size /= 2;
    return NEXT(write)(fd, data, size);
}

#define SYNC(name)                                                            \
    int name(int fd) {                                                        \
        if (hits(fd, 3)) FAIL;                                                \
        return NEXT(name)(fd);                                                \
    }
SYNC(fdatasync)
SYNC(fsync)

#define READ(name)                                                            \
    ssize_t name(int fd, void *data, size_t size, off_t at) {                 \
        if (hits(fd, 4)) FAIL;                                                \
        return NEXT(name)(fd, data, size, at);                                \
    }
READ(pread)
READ(pread64)
