/* Preloaded, it sets the clock of the day to yesterday, to today and to tomorrow in turn, for half a second each. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { DAY = 86400, HALF_A_SECOND = 500000000 };

static time_t jump(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return ((now.tv_sec * 2 + now.tv_nsec / HALF_A_SECOND) % 3 - 1) * DAY;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int code = clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return code;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
