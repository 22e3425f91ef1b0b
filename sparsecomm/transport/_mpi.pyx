# cython: language_level=3, boundscheck=False, wraparound=False
"""The part of the MPI transport that must be quick: sends, receives, and the way in which a rank waits.

Everything is non-blocking underneath. A wait tests MPI for a few tens of microseconds, then lets other processes
run between tests, then sleeps; in the slow part it calls `attend` of the Python class now and then, which decides
whether to go on. MPI is called without the GIL.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE, MPI_BYTE, MPI_COMM_NULL, MPI_REQUEST_NULL, MPI_STATUS_IGNORE, MPI_SUCCESS,
    MPI_Comm, MPI_Get_count, MPI_Improbe, MPI_Imrecv, MPI_Iprobe, MPI_Isend, MPI_Message, MPI_Mrecv,
    MPI_Request, MPI_Request_free, MPI_Status, MPI_Test, MPI_Comm_rank, MPI_Comm_size,
)


from sparsecomm.transport.memory import HOST

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
    CONTROL = 0  # the tag of control messages; those of data are above
    FIRST_NAP = 20_000  # nanoseconds
    LONGEST_NAP = 200_000

cdef double YIELD = 1e-3  # seconds of giving way to other processes, before the wait sleeps
cdef double POLL = 0.05  # seconds between looks at signals, at the clock and at what others say
cdef double PING = 0.25  # seconds until the peer is told that it is waited for; doubles every time

cdef inline double seconds() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef int hold(memory, Py_buffer *view, int flags) except -1:
    """The bytes of an array in host memory, or in that of a device, which has no buffer protocol.

    ``view`` is all zeros before: where nothing is to be released, that says so.
    """
    if PyObject_CheckBuffer(memory):
        return PyObject_GetBuffer(memory, view, flags)
    said = memory.__cuda_array_interface__
    view.buf = <void *> <uintptr_t> said["data"][0]
    view.len = memory.nbytes
    return 0


cdef struct Patience:
    double since  # when the wait began; 0 until it has failed once
    double poll  # when to poll next
    double ping  # seconds of waiting until the next enquiry
    long nap


cdef class Transfer:
    """A message under way: its requests, one per piece, and a hold on its memory until they are complete."""

    cdef Endpoint endpoint
    cdef int peer
    cdef Py_buffer memory
    cdef object owner
    cdef MPI_Request only  # spares the common message, of one piece, an allocation
    cdef MPI_Request *requests
    cdef Py_ssize_t started, complete

    def wait(self):
        self.endpoint.finish(self)

    cdef int test(self, bint *flag) noexcept nogil:
        """Go on through the pieces. A piece that failed counts as complete: MPI is done with it."""
        cdef int code = MPI_SUCCESS
        cdef int done = 1
        while done and code == MPI_SUCCESS and self.complete < self.started:
            code = MPI_Test(&self.requests[self.complete], &done, MPI_STATUS_IGNORE)
            if done or code != MPI_SUCCESS:
                self.complete += 1
        flag[0] = self.complete == self.started
        return code

    def __dealloc__(self):
        if self.complete < self.started:
            return  # MPI may still use the memory: better lost than reused
        if self.requests != &self.only:
            free(self.requests)
        PyBuffer_Release(&self.memory)


cdef class Endpoint:
    """One rank's end of a communicator that nobody else uses.

    The subclass says how to go on while waiting (``attend(peer, waited, ping)``, which may raise) and what error
    a code of MPI is (``failure(code, peer)``).
    """

    cdef MPI_Comm comm
    cdef readonly int rank, size
    cdef public int tag  # of the current call's data
    cdef public double timeout  # seconds, of the current call
    cdef public object counters
    cdef readonly Py_ssize_t limit  # bytes in one piece; a piece of this length announces another
    cdef double spin
    cdef list under_way

    def __init__(self, uintptr_t address, Py_ssize_t limit, double spin, counters):
        self.comm = (<MPI_Comm *> address)[0]
        MPI_Comm_rank(self.comm, &self.rank)
        MPI_Comm_size(self.comm, &self.size)
        self.limit = limit
        self.spin = spin
        self.counters = counters
        self.under_way = []

    # -- data -------------------------------------------------------------------------------------------------------

    def isend(self, data, int to, memory=HOST):
        return self.send(data, to, memory)

    def receive(self, int source, memory=HOST, Py_ssize_t expected=0):
        return self.message(source, memory, expected)

    def exchange(self, data, int to, int source, memory=HOST, Py_ssize_t expected=0):
        cdef Transfer sending = self.send(data, to, memory)
        message = self.message(source, memory, expected)
        self.finish(sending)
        return message

    cdef Transfer send(self, data, int to, memory):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        hold(data, &transfer.memory, PyBUF_SIMPLE)
        transfer.owner = data
        transfer.endpoint = self
        self.start(transfer, to, self.tag, self.limit, memory)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += transfer.memory.len
        return transfer

    cdef int start(self, Transfer transfer, int to, int tag, Py_ssize_t limit, memory) except -1:
        cdef char *address = <char *> transfer.memory.buf
        cdef Py_ssize_t nbytes = transfer.memory.len
        cdef Py_ssize_t pieces = nbytes // limit + 1
        cdef Py_ssize_t i
        cdef int code = MPI_SUCCESS
        transfer.peer = to
        transfer.requests = &transfer.only
        if pieces > 1:
            transfer.requests = <MPI_Request *> malloc(pieces * sizeof(MPI_Request))
            if transfer.requests == NULL:
                raise MemoryError
        self.under_way.append(transfer)
        for i in range(pieces):
            if memory is not HOST:  # a piece leaves while the next one is still being copied
                memory.ready(transfer.owner, min(nbytes, (i + 1) * limit))
            with nogil:
                code = MPI_Isend(address + i * limit, <int> min(limit, nbytes - i * limit), MPI_BYTE, to, tag,
                                 self.comm, &transfer.requests[i])
            if code != MPI_SUCCESS:
                break
            transfer.started += 1
        if code != MPI_SUCCESS:
            raise self.failure(code, to)
        return 0

    cdef message(self, int source, memory, Py_ssize_t expected):
        """The pieces of one message, in memory that ``memory`` makes.

        Its length is not announced, and nothing is allocated on a peer's word, but for what a piece has brought: for
        several pieces there is room for ``expected`` bytes, and for more if more have come.
        """
        cdef MPI_Message piece
        cdef Py_ssize_t length = self.probe(source, &piece)
        cdef Py_ssize_t end = length
        message = memory.empty(length if length < self.limit else max(expected, length))
        self.finish(self.take(message[:length], &piece, source))
        while length == self.limit:
            memory.landed(message, end - length, end)
            length = self.probe(source, &piece)
            if end + length > len(message):
                larger = memory.empty(max(end + length, 2 * len(message)))
                memory.move(message[:end], larger)
                message = larger
            self.finish(self.take(message[end : end + length], &piece, source))
            end += length
        if end > self.limit:
            memory.landed(message, end - length, end)
        self.counters.messages_received += 1
        self.counters.bytes_received += end
        return message if end == len(message) else message[:end]

    cdef Py_ssize_t probe(self, int source, MPI_Message *message) except -1:
        """Wait for a piece; return its length."""
        cdef Patience patience
        cdef MPI_Status status
        cdef int code, nbytes
        cdef int found = 0
        patience.since = 0
        while not found:
            with nogil:
                while True:
                    code = MPI_Improbe(source, self.tag, self.comm, &found, message, &status)
                    if found or code != MPI_SUCCESS or self.pause(&patience):
                        break
            if code != MPI_SUCCESS:
                raise self.failure(code, source)
            if not found:
                self.look_around(&patience, source)
        MPI_Get_count(&status, MPI_BYTE, &nbytes)
        return nbytes

    cdef Transfer take(self, memory, MPI_Message *message, int source):
        """Start receiving a message that a probe has found."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        cdef int code
        hold(memory, &transfer.memory, PyBUF_WRITABLE)
        transfer.owner = memory
        transfer.endpoint = self
        transfer.peer = source
        transfer.requests = &transfer.only
        with nogil:
            code = MPI_Imrecv(transfer.memory.buf, <int> transfer.memory.len, MPI_BYTE, message, &transfer.only)
        if code != MPI_SUCCESS:
            raise self.failure(code, source)
        transfer.started = 1
        self.under_way.append(transfer)
        return transfer

    # -- waiting ----------------------------------------------------------------------------------------------------

    cdef int finish(self, Transfer transfer) except -1:
        cdef Patience patience
        cdef int code
        cdef bint done = transfer.complete == transfer.started
        if done and transfer not in self.under_way:
            return 0  # a second wait
        patience.since = 0
        while not done:
            with nogil:
                while True:
                    code = transfer.test(&done)
                    if done or code != MPI_SUCCESS or self.pause(&patience):
                        break
            if code != MPI_SUCCESS:
                raise self.failure(code, transfer.peer)
            if not done:
                self.look_around(&patience, transfer.peer)
        self.under_way.remove(transfer)
        return 0

    cdef bint pause(self, Patience *patience) noexcept nogil:
        """Let a moment pass; true when it is time to look around."""
        cdef double now = seconds()
        cdef int heard = 0
        cdef timespec nap
        if patience.since == 0:
            patience.since = now
            patience.poll = now + min(POLL, self.timeout)
            patience.ping = PING
            patience.nap = FIRST_NAP
        if now - patience.since < self.spin:
            return False
        if now - patience.since < self.spin + YIELD:
            sched_yield()
            return now >= patience.poll
        nap.tv_sec = 0
        nap.tv_nsec = patience.nap
        nanosleep(&nap, NULL)
        patience.nap = min(patience.nap + patience.nap // 8, LONGEST_NAP)
        if MPI_Iprobe(MPI_ANY_SOURCE, CONTROL, self.comm, &heard, MPI_STATUS_IGNORE) != MPI_SUCCESS:
            return True
        return heard or now >= patience.poll

    cdef int look_around(self, Patience *patience, int peer) except -1:
        cdef double now = seconds()
        cdef double waited = now - patience.since
        cdef bint ping = waited >= patience.ping
        PyErr_CheckSignals()
        if ping:
            patience.ping = 2 * patience.ping + PING  # the pauses between enquiries double
        patience.poll = min(now + POLL, patience.since + self.timeout)
        self.poll(peer, waited, ping)
        return 0

    # -- control messages and what calls leave behind ---------------------------------------------------------------

    def send_control(self, bytes message, int to):
        """Send a control message; it must be short enough to leave at once."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        PyObject_GetBuffer(message, &transfer.memory, PyBUF_SIMPLE)
        transfer.endpoint = self
        self.start(transfer, to, CONTROL, transfer.memory.len + 1, HOST)  # always in one piece

    def recv_control(self):
        """The next control message that has arrived, as (rank, bytes), or None."""
        cdef MPI_Message message
        cdef MPI_Status status
        cdef int code, nbytes
        cdef int found = 0
        with nogil:
            code = MPI_Improbe(MPI_ANY_SOURCE, CONTROL, self.comm, &found, &message, &status)
        if code == MPI_SUCCESS and found:
            MPI_Get_count(&status, MPI_BYTE, &nbytes)
            text = PyBytes_FromStringAndSize(NULL, nbytes)
            code = MPI_Mrecv(PyBytes_AS_STRING(text), nbytes, MPI_BYTE, &message, MPI_STATUS_IGNORE)
        if code != MPI_SUCCESS:
            raise self.failure(code, -1)
        return (status.MPI_SOURCE, text) if found else None

    def discard(self, int tag):
        """Take in and forget what has arrived with ``tag``, so that its senders can free their memory."""
        cdef MPI_Message message
        cdef MPI_Status status
        cdef int nbytes
        cdef int found = 1
        while found:
            found = 0
            if MPI_Improbe(MPI_ANY_SOURCE, tag, self.comm, &found, &message, &status) == MPI_SUCCESS and found:
                MPI_Get_count(&status, MPI_BYTE, &nbytes)
                self.take(bytearray(nbytes), &message, status.MPI_SOURCE)

    def reap(self):
        """Let go of transfers that earlier calls left and that are complete by now; return how many are not.

        Never called during a wait: it would take from it the transfer that is waited for, and its error.
        """
        cdef Transfer transfer
        cdef bint done
        left = []
        for transfer in self.under_way:
            transfer.test(&done)
            if not done:
                left.append(transfer)
        self.under_way = left
        return len(left)

    def leave(self):
        """Hand transfers that nobody waits for over to MPI: it completes them, and their memory is never reused."""
        cdef Transfer transfer
        cdef Py_ssize_t i
        self.reap()
        for transfer in self.under_way:
            for i in range(transfer.complete, transfer.started):
                if transfer.requests[i] != MPI_REQUEST_NULL:
                    MPI_Request_free(&transfer.requests[i])
        self.under_way = []
        self.comm = MPI_COMM_NULL
