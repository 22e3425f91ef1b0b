# cython: language_level=3
"""Votes of ranks on calls, by ULFM's agreement, which also ends where ranks die.

This is in Cython since a signal handler runs only between the instructions of Python code: a vote that was cast is
known to have been cast, and a decision that was read is kept.
"""

from array import array
from threading import Lock

from mpi4py import MPI

from sparsecomm.transport._waiting cimport MIN_SLEEP, give_way, monotonic


cdef class Agreement:
    """The votes on the calls of a transport: one per call and rank, in the order of the calls' numbers.

    MPI pairs the agreements of all ranks in their order. So a rank votes on every number, also where it skips one.
    """

    cdef object comm, lock
    cdef double spin
    cdef readonly long voted  # the number of the call that this rank voted on last
    cdef readonly long approved  # the number of the call that it voted for last
    cdef dict open  # number -> (request, vote), of votes whose decision nobody has read
    cdef long number  # of the call whose decision was read last
    cdef bint yes  # what it was

    def __init__(self, comm, double spin):
        """Begin with call 1.

        Args:
            comm: a communicator on which nobody else agrees.
            spin: seconds for which a wait keeps the core busy.
        """
        self.comm, self.spin, self.lock = comm, spin, Lock()
        self.open = {}

    def vote(self, long number, bint yes):
        """Vote on call ``number``; against those before it that have no vote yet. Only the first vote counts."""
        self.lock.acquire()
        try:
            while self.voted < number:
                self.voted += 1
                ballot = array("i", [yes and self.voted == number])
                if ballot[0]:
                    self.approved = number
                try:
                    self.open[self.voted] = self.comm.Iagree(ballot), ballot
                except MPI.Exception:
                    self.open[self.voted] = None  # MPI cannot: the call does not count
        finally:
            self.lock.release()

    def decided(self, long number, double seconds):
        """Wait for the decision on a call that this rank has voted on, for so long; return whether it is known."""
        cdef double began = monotonic(), now = began
        cdef long sleep = MIN_SLEEP
        if self.number == number:
            return True
        while not self.test(number):
            now = monotonic()
            if now - began >= seconds:
                return False
            with nogil:
                give_way(now - began, self.spin, &sleep)
        return True

    def accepted(self, long number):
        """Return whether it is known that all ranks have voted for the call, and that all lived."""
        return self.number == number and self.yes

    @property
    def waiting(self):
        """Whether there are votes whose decision nobody has read."""
        return bool(self.open)

    def reap(self, long number):
        """Forget the votes on calls before ``number`` whose decision has come; nobody waits for them."""
        for old in sorted(self.open):
            if old < number:
                self.test(old)

    cdef bint test(self, long number) except -1:
        """Read the decision on a call, if it is there."""
        cdef bint yes = False
        found = self.open[number]
        if found is not None:
            request, ballot = found
            try:
                if not request.Test():
                    return False
                yes = ballot[0]
            except MPI.Exception:
                pass  # a rank died
        del self.open[number]
        if number > self.number:
            self.number, self.yes = number, yes
        return True
