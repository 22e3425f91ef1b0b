"""How a thread waits for something that MPI must be asked for: it keeps the core busy, then yields, then sleeps."""

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    struct timespec:
        time_t tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int, timespec *)
    int nanosleep(const timespec *, timespec *)

cdef enum:
    MIN_SLEEP = 20_000  # nanoseconds
    MAX_SLEEP = 200_000
    YIELD_TIME = 1_000_000  # nanoseconds for which a wait yields to other processes, before it sleeps


cdef inline double monotonic() noexcept nogil:
    """Return seconds since some time in the past."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef inline bint give_way(double waited, double spin, long *sleep) noexcept nogil:
    """Let a moment pass after a test that failed; return whether it was a sleep.

    ``waited``: seconds so far; ``spin``: for how many of them the core is kept busy; ``sleep``: nanoseconds, from
    `MIN_SLEEP` on, which this makes longer.
    """
    cdef timespec moment
    if waited < spin:
        return False
    if waited < spin + 1e-9 * YIELD_TIME:
        sched_yield()
        return False
    moment.tv_sec, moment.tv_nsec = 0, sleep[0]
    nanosleep(&moment, NULL)
    sleep[0] = min(sleep[0] + sleep[0] // 8, MAX_SLEEP)
    return True
