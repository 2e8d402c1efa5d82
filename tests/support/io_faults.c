/* Injects errors, delays and short transfers into file operations of a process: preloaded by tests/support/io_faults.py.

   One fault is armed at a time, by io_faults_arm() from inside the process or by the variable IO_FAULT when it starts.
   Operations outside of the folder under test are never touched. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX], operation[32], pattern[256], record_file[PATH_MAX], fired_file[PATH_MAX];
static int error_number, first_call, num_calls, delay_ms, window_ms, is_short;
static int is_armed, calls_seen, times_fired;
static long long armed_at_ms;

static long long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* Arm a fault: `op` of files whose path below the folder matches `glob` ("*" matches all).
   Of the matching calls the one numbered `first` (from 1) and the next ones fail, `count` in all (0: without end);
   with `window` > 0 every matching call fails until so many milliseconds have passed.
   `error` 0 with `delay` only delays; `shorten` makes reads and writes transfer about half of what was asked for. */
void io_faults_arm(const char *folder, const char *op, const char *glob, int error, int first, int count, int delay,
                   int window, int shorten) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", folder);
  snprintf(operation, sizeof operation, "%s", op);
  snprintf(pattern, sizeof pattern, "%s", glob);
  error_number = error, first_call = first, num_calls = count, delay_ms = delay, window_ms = window;
  is_short = shorten, calls_seen = 0, times_fired = 0, armed_at_ms = now_ms(), is_armed = 1;
  pthread_mutex_unlock(&lock);
}

void io_faults_disarm(void) { is_armed = 0; }

int io_faults_fired(void) { return times_fired; }

/* Append `operation<TAB>path below the folder` to a file for every call; an empty name ends that. */
void io_faults_record(const char *folder, const char *file) {
  snprintf(root, sizeof root, "%s", folder);
  snprintf(record_file, sizeof record_file, "%s", file);
}

static void append(const char *file, const char *op, const char *path) {
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%s\t%s\n", op, path);
  int fd = REAL(open)(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0) {
    if (REAL(write)(fd, line, length) != length) abort();
    REAL(close)(fd);
  }
}

/* IO_FAULT="folder|op|glob|error|first|count|delay|window|short", for processes whose command line contains
   IO_FAULT_ONLY. IO_FAULT_FIRED and IO_FAULT_RECORD name files outside of the folder. */
__attribute__((constructor)) static void begin(void) {
  const char *spec = getenv("IO_FAULT"), *only = getenv("IO_FAULT_ONLY");
  char text[8192] = "";
  int fd = REAL(open)("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t length = fd >= 0 ? REAL(read)(fd, text, sizeof text - 1) : 0;
  if (fd >= 0) REAL(close)(fd);
  for (ssize_t i = 0; i + 1 < length; i++)
    if (text[i] == 0) text[i] = ' ';
  if (only != NULL && strstr(text, only) == NULL) return;
  if (getenv("IO_FAULT_FIRED")) snprintf(fired_file, sizeof fired_file, "%s", getenv("IO_FAULT_FIRED"));
  if (getenv("IO_FAULT_RECORD") && getenv("IO_FAULT_ROOT"))
    io_faults_record(getenv("IO_FAULT_ROOT"), getenv("IO_FAULT_RECORD"));
  if (spec == NULL) return;
  char folder[4096], op[32], glob[256];
  int e, f, n, d, w, s;
  if (sscanf(spec, "%4095[^|]|%31[^|]|%255[^|]|%d|%d|%d|%d|%d|%d", folder, op, glob, &e, &f, &n, &d, &w, &s) != 9)
    abort();
  io_faults_arm(folder, op, glob, e, f, n, d, w, s);
}

/* 0: go on; 1: fail with errno set; 2: transfer less. */
static int fault(const char *op, int directory, const char *name) {
  if (root[0] == 0 || name == NULL) return 0;
  int before = errno;
  char path[2 * PATH_MAX];
  if (name[0] == '/' || directory == AT_FDCWD)
    snprintf(path, sizeof path, "%s", name);
  else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 0) return errno = before, 0;
    path[length] = 0;
    if (name[0] != 0) snprintf(path + length, PATH_MAX, "/%s", name);
  }
  errno = before;
  size_t length = strlen(root);
  if (strncmp(path, root, length) != 0 || (path[length] != '/' && path[length] != 0)) return 0;
  const char *below = path[length] == 0 ? "." : path + length + 1;
  if (record_file[0]) append(record_file, op, below), errno = before;
  if (!is_armed) return 0;
  pthread_mutex_lock(&lock);
  int hits = is_armed && (strcmp(operation, "*") == 0 || strcmp(operation, op) == 0) && fnmatch(pattern, below, 0) == 0;
  if (hits && window_ms > 0)
    hits = now_ms() < armed_at_ms + window_ms;
  else if (hits) {
    calls_seen++;
    hits = calls_seen >= first_call && (num_calls == 0 || calls_seen < first_call + num_calls);
  }
  times_fired += hits;
  int error = error_number, wait = delay_ms, shorten = is_short;
  pthread_mutex_unlock(&lock);
  if (!hits) return 0;
  if (fired_file[0]) append(fired_file, op, below);
  if (wait > 0) {
    struct timespec rest = {wait / 1000, wait % 1000 * 1000000L};
    while (nanosleep(&rest, &rest) != 0)
      ; /* the kernel does not let go of a process that waits for a file server */
  }
  errno = before;
  if (shorten) return 2;
  if (error == 0) return 0;
  errno = error;
  return 1;
}

#define OF_FD(op, fd) fault(op, fd, "")

#define OPEN(name)                                                              \
  int name(const char *path, int flags, ...) {                                  \
    va_list rest;                                                               \
    va_start(rest, flags);                                                      \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;   \
    va_end(rest);                                                               \
    const char *op = flags & (O_WRONLY | O_RDWR) ? "create" : "open";           \
    return fault(op, AT_FDCWD, path) == 1 ? -1 : REAL(name)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                \
  int name(int at, const char *path, int flags, ...) {                              \
    va_list rest;                                                                   \
    va_start(rest, flags);                                                          \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;       \
    va_end(rest);                                                                   \
    const char *op = flags & (O_WRONLY | O_RDWR) ? "create" : "open";               \
    return fault(op, at, path) == 1 ? -1 : REAL(name)(at, path, flags, mode);       \
  }
OPENAT(openat)
OPENAT(openat64)

static size_t less(size_t count, int found) { return found == 2 && count > 1 ? (count + 1) / 2 : count; }

ssize_t read(int fd, void *buffer, size_t count) {
  int found = OF_FD("read", fd);
  return found == 1 ? -1 : REAL(read)(fd, buffer, less(count, found));
}

ssize_t write(int fd, const void *buffer, size_t count) {
  int found = OF_FD("write", fd);
  return found == 1 ? -1 : REAL(write)(fd, buffer, less(count, found));
}

#define PREAD(name, off)                                                        \
  ssize_t name(int fd, void *buffer, size_t count, off at) {                    \
    int found = OF_FD("read", fd);                                              \
    return found == 1 ? -1 : REAL(name)(fd, buffer, less(count, found), at);    \
  }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define PWRITE(name, off)                                                       \
  ssize_t name(int fd, const void *buffer, size_t count, off at) {              \
    int found = OF_FD("write", fd);                                             \
    return found == 1 ? -1 : REAL(name)(fd, buffer, less(count, found), at);    \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define SIMPLE(name, op, at, path, arguments, ...) \
  int name arguments { return fault(op, at, path) == 1 ? -1 : REAL(name)(__VA_ARGS__); }

SIMPLE(fsync, "fsync", fd, "", (int fd), fd)
SIMPLE(fdatasync, "fsync", fd, "", (int fd), fd)
SIMPLE(ftruncate, "truncate", fd, "", (int fd, off_t length), fd, length)
SIMPLE(ftruncate64, "truncate", fd, "", (int fd, off64_t length), fd, length)
SIMPLE(flock, "flock", fd, "", (int fd, int how), fd, how)
SIMPLE(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
SIMPLE(renameat, "rename", bt, to, (int at, const char *from, int bt, const char *to), at, from, bt, to)
SIMPLE(link, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
SIMPLE(stat, "stat", AT_FDCWD, path, (const char *path, struct stat *into), path, into)
SIMPLE(stat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *into), path, into)
SIMPLE(lstat, "stat", AT_FDCWD, path, (const char *path, struct stat *into), path, into)
SIMPLE(lstat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *into), path, into)
SIMPLE(fstat, "fstat", fd, "", (int fd, struct stat *into), fd, into)
SIMPLE(fstat64, "fstat", fd, "", (int fd, struct stat64 *into), fd, into)
SIMPLE(fstatat, "stat", at, path, (int at, const char *path, struct stat *into, int flags), at, path, into, flags)
SIMPLE(fstatat64, "stat", at, path, (int at, const char *path, struct stat64 *into, int flags), at, path, into, flags)
SIMPLE(access, "stat", AT_FDCWD, path, (const char *path, int mode), path, mode)
SIMPLE(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
SIMPLE(unlinkat, "unlink", at, path, (int at, const char *path, int flags), at, path, flags)
SIMPLE(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
SIMPLE(rmdir, "unlink", AT_FDCWD, path, (const char *path), path)
SIMPLE(chdir, "chdir", AT_FDCWD, path, (const char *path), path)
SIMPLE(statvfs, "statvfs", AT_FDCWD, path, (const char *path, struct statvfs *into), path, into)
SIMPLE(statvfs64, "statvfs", AT_FDCWD, path, (const char *path, struct statvfs64 *into), path, into)
SIMPLE(utimensat, "utime", at, path, (int at, const char *path, const struct timespec when[2], int flags), at, path,
       when, flags)
SIMPLE(futimens, "utime", fd, "", (int fd, const struct timespec when[2]), fd, when)

/* An error of close() leaves the descriptor closed all the same. */
int close(int fd) {
  int found = OF_FD("close", fd), error = errno, result = REAL(close)(fd);
  return found == 1 ? (errno = error, -1) : result;
}

DIR *opendir(const char *path) { return fault("opendir", AT_FDCWD, path) == 1 ? NULL : REAL(opendir)(path); }

struct dirent *readdir(DIR *folder) {
  return OF_FD("readdir", dirfd(folder)) == 1 ? NULL : REAL(readdir)(folder);
}

struct dirent64 *readdir64(DIR *folder) {
  return OF_FD("readdir", dirfd(folder)) == 1 ? NULL : REAL(readdir64)(folder);
}
