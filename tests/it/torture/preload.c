/* Disk and clock faults: wrappers of libc functions, loaded with LD_PRELOAD.
 *
 * The test and the process share a page of memory, mapped from the file that TORTURE_CONTROL names. It contains
 * numbers: the test sets which calls fail, and reads how many failed. The fields are those of `Field` in preload.rs.
 *
 * If TORTURE_SHADOW names a folder, the library keeps there what a power cut would leave of each database file: the
 * synced pages, and other pages chosen at random, as if the kernel had written them back. If a sync fails, the pages
 * that it should have written count as clean, as on Linux; they reach the disk only if they are written again. Which
 * pages are dirty is kept there too, because the kernel knows it after the end of a process.
 *
 * If TORTURE_SYNCS names a file, each sync of any file or folder adds a line with its size and path to it. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum field {
    /* Written by the test. */
    SYNC_FILES,      /* files whose syncs fail: bits of enum file */
    SYNC_ERRNO,
    WRITE_FILES,     /* files whose writes fail */
    WRITE_ERRNO,
    SYNC_DELAY_MS,   /* additional duration of a sync */
    CLOCK_SECS,      /* offset of the wall clock */
    WRITE_BACK,      /* percentage of written pages that reach the disk without a sync */
    /* Written by this library. */
    SYNCS_FAILED,
    WRITES_FAILED,
    SYNCS_DELAYED,
    CLOCKS_SHIFTED,
    FIELDS
};

enum file { OTHER = 0, WAL = 1, DATABASE = 2 };

static _Atomic int64_t *control;

static void count(enum field field) { control[field]++; }

/* Called first in every wrapper, possibly before any constructor has run. */
static int is_ready(void) {
    static _Atomic int state; /* 0 new, 1 initializing, 2 ready, 3 no control file */
    int new = 0;
    if (state == 0 && atomic_compare_exchange_strong(&state, &new, 1)) {
        const char *path = getenv("TORTURE_CONTROL");
        int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
        void *page = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (page != MAP_FAILED) control = page;
        state = page == MAP_FAILED ? 3 : 2;
    }
    return state == 2;
}

static int ends_with(const char *text, const char *end) {
    size_t length = strlen(text), end_length = strlen(end);
    return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

#define PATH 4096

/* Fills path, which has room for PATH bytes. Returns its length, or -1. */
static ssize_t path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH - 1);
    if (length >= 0) path[length] = 0;
    return length;
}

static enum file file_of(int fd) {
    char path[PATH];
    if (path_of(fd, path) < 0) return OTHER;
    return ends_with(path, ".db-wal") ? WAL : ends_with(path, ".db") ? DATABASE : OTHER;
}

static void list_sync(int fd) {
    const char *list = getenv("TORTURE_SYNCS");
    char path[PATH], line[PATH + 32];
    struct stat stat;
    if (list == NULL || path_of(fd, path) < 0 || fstat(fd, &stat) != 0) return;
    int length = snprintf(line, sizeof line, "%lld %s\n", (long long)stat.st_size, path);
    int out = open(list, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out < 0 || syscall(SYS_write, out, line, (size_t)length) != length) abort();
    close(out);
}

/* The shadow of a file: the contents that a power cut would leave. */

#define PAGE 4096
#define PAGES_MAX (1 << 20)

/* Survives the process, in a file. */
struct pages {
    int64_t end; /* no page from here on is dirty */
    char is_dirty[PAGES_MAX];
};

static struct shadow {
    int fd; /* 0: not opened yet */
    struct pages *pages;
} shadows[3];
static pthread_mutex_t shadows_lock = PTHREAD_MUTEX_INITIALIZER;

static int open_in_shadow(enum file file, const char *suffix) {
    char path[4096];
    snprintf(path, sizeof path, "%s/orlop.db%s%s", getenv("TORTURE_SHADOW"), file == WAL ? "-wal" : "", suffix);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) abort();
    return fd;
}

static struct shadow *shadow_of(enum file file) {
    if (getenv("TORTURE_SHADOW") == NULL || file == OTHER) return NULL;
    struct shadow *shadow = &shadows[file];
    if (shadow->fd == 0) {
        int fd = open_in_shadow(file, ".pages");
        if (syscall(SYS_ftruncate, fd, sizeof(struct pages)) != 0) abort();
        shadow->pages = mmap(NULL, sizeof(struct pages), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (shadow->pages == MAP_FAILED) abort();
        close(fd);
        shadow->fd = open_in_shadow(file, "");
    }
    return shadow;
}

static void write_back(struct shadow *shadow, int fd, int64_t page) {
    /* The file may have been opened for writing only. */
    char link[64], bytes[PAGE];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reader = open(link, O_RDONLY | O_CLOEXEC);
    ssize_t length = reader < 0 ? -1 : pread(reader, bytes, PAGE, page * PAGE);
    if (reader >= 0) close(reader);
    if (length > 0 && syscall(SYS_pwrite64, shadow->fd, bytes, (size_t)length, page * PAGE) != length) abort();
    shadow->pages->is_dirty[page] = 0;
}

static void written(int fd, enum file file, int64_t from, int64_t length) {
    pthread_mutex_lock(&shadows_lock);
    struct shadow *shadow = shadow_of(file);
    for (int64_t page = from / PAGE; shadow != NULL && page <= (from + length - 1) / PAGE; page++) {
        if (page >= PAGES_MAX) {
            fprintf(stderr, "preload.c: a file has more than %d pages\n", PAGES_MAX);
            abort();
        }
        shadow->pages->is_dirty[page] = 1;
        if (page >= shadow->pages->end) shadow->pages->end = page + 1;
        if (random() % 100 < control[WRITE_BACK]) write_back(shadow, fd, page);
    }
    pthread_mutex_unlock(&shadows_lock);
}

static void truncated(enum file file, int64_t length) {
    pthread_mutex_lock(&shadows_lock);
    struct shadow *shadow = shadow_of(file);
    if (shadow != NULL) {
        for (int64_t page = (length + PAGE - 1) / PAGE; page < shadow->pages->end; page++) shadow->pages->is_dirty[page] = 0;
        if (syscall(SYS_ftruncate, shadow->fd, length) != 0) abort();
    }
    pthread_mutex_unlock(&shadows_lock);
}

static void synced(int fd, enum file file, int is_lost) {
    pthread_mutex_lock(&shadows_lock);
    struct shadow *shadow = shadow_of(file);
    for (int64_t page = 0; shadow != NULL && page < shadow->pages->end; page++) {
        if (!shadow->pages->is_dirty[page]) continue;
        if (is_lost) shadow->pages->is_dirty[page] = 0;
        else write_back(shadow, fd, page);
    }
    pthread_mutex_unlock(&shadows_lock);
}

/* The wrapped functions. */

static int fails(enum field files, enum file file) { return (control[files] & file) != 0; }

static int sync_file(long call, int fd) {
    enum file file = is_ready() ? file_of(fd) : OTHER;
    if (file != OTHER && control[SYNC_DELAY_MS] > 0) {
        count(SYNCS_DELAYED);
        usleep((useconds_t)(control[SYNC_DELAY_MS] * 1000));
    }
    if (file != OTHER && fails(SYNC_FILES, file)) {
        synced(fd, file, 1);
        count(SYNCS_FAILED);
        errno = (int)control[SYNC_ERRNO];
        return -1;
    }
    int done = (int)syscall(call, fd);
    if (done == 0) list_sync(fd);
    if (done == 0 && file != OTHER) synced(fd, file, 0);
    return done;
}

int fsync(int fd) { return sync_file(SYS_fsync, fd); }
int fdatasync(int fd) { return sync_file(SYS_fdatasync, fd); }

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) {
    enum file file = is_ready() ? file_of(fd) : OTHER;
    if (file != OTHER && fails(WRITE_FILES, file)) {
        count(WRITES_FAILED);
        errno = (int)control[WRITE_ERRNO];
        return -1;
    }
    ssize_t done = syscall(SYS_pwrite64, fd, bytes, length, at);
    if (file != OTHER && done > 0) written(fd, file, at, done);
    return done;
}
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) { return pwrite64(fd, bytes, length, at); }

/* SQLite calls write instead of pwrite if it is built that way. */
ssize_t write(int fd, const void *bytes, size_t length) {
    enum file file = is_ready() ? file_of(fd) : OTHER;
    if (file == OTHER) return syscall(SYS_write, fd, bytes, length);
    off64_t at = lseek64(fd, 0, SEEK_CUR);
    ssize_t done = pwrite64(fd, bytes, length, at);
    if (done > 0) lseek64(fd, at + done, SEEK_SET);
    return done;
}

int ftruncate64(int fd, off64_t length) {
    enum file file = is_ready() ? file_of(fd) : OTHER;
    int done = (int)syscall(SYS_ftruncate, fd, length);
    if (file != OTHER && done == 0) truncated(file, length);
    return done;
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

/* Only the wall clock is changed, because CLOCK_MONOTONIC never jumps. */

static int64_t jump(void) {
    if (!is_ready() || control[CLOCK_SECS] == 0) return 0;
    count(CLOCKS_SHIFTED);
    return control[CLOCK_SECS];
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = (int)syscall(SYS_clock_gettime, clock, now);
    if (done == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int done = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return done;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}
