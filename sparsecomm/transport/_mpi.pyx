# cython: language_level=3, boundscheck=False, wraparound=False
"""The part of the MPI transport that must be quick: sends, receives, and the way in which a rank waits.

A message travels in pieces: a first one of at most `FIRST` bytes, which no rank exceeds and which has a place of that
size before it comes, and longer ones, whose places are made when they have come. A piece that is full announces another.

Everything is non-blocking underneath. A wait tests MPI for a few tens of microseconds, then lets other processes run
between tests, then sleeps. In the slow part it calls `poll` of the Python class now and then, which decides whether to
go on. MPI is called without the GIL.
"""

cimport cython
cimport numpy as np
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE, MPI_BYTE, MPI_COMM_NULL, MPI_ERR_TRUNCATE, MPI_REQUEST_NULL, MPI_STATUS_IGNORE, MPI_SUCCESS,
    MPI_Cancel, MPI_Comm, MPI_Comm_rank, MPI_Comm_size, MPI_Error_class, MPI_Finalized, MPI_Get_count, MPI_Improbe,
    MPI_Imrecv, MPI_Iprobe, MPI_Irecv, MPI_Isend, MPI_Message, MPI_Mrecv, MPI_Request, MPI_Request_free, MPI_Status,
    MPI_Test,
)

from sparsecomm.transport.memory import HOST

np.import_array()

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

cdef extern from *:
    """
    #define SC_TEXT_(x) #x
    #define SC_TEXT(x) SC_TEXT_(x)
    #if defined(OPEN_MPI)
    #  define SC_BUILT_WITH "Open MPI " SC_TEXT(OMPI_MAJOR_VERSION) "." SC_TEXT(OMPI_MINOR_VERSION) \
                            "." SC_TEXT(OMPI_RELEASE_VERSION)
    #elif defined(MPI_ABI_VERSION)
    #  define SC_BUILT_WITH "the standard ABI of MPI, version " SC_TEXT(MPI_ABI_VERSION) "." SC_TEXT(MPI_ABI_SUBVERSION)
    #else
    #  define SC_BUILT_WITH "MPICH " MPICH_VERSION
    #endif
    """
    const char *SC_BUILT_WITH

built_with = SC_BUILT_WITH.decode()  # the MPI whose headers were used

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef int PROCESS = getpid()


def usable():
    """Return whether MPI can be used: it was not finalised, and this process is the one that has started it."""
    cdef int finalized = 0
    MPI_Finalized(&finalized)
    return getpid() == PROCESS and not finalized


cdef enum:
    CONTROL = 0  # the tag of control messages; those of data are above
    FIRST = 65_536  # bytes in the first piece of a message

cdef double POLL_INTERVAL = 0.05  # seconds between looks at signals, the clock and control messages
cdef double PING_INTERVAL = 0.25  # seconds until the peer is told that it is waited for; doubles every time
cdef double YIELD_TIME = 1e-3  # seconds for which a wait yields to other processes, before it sleeps
cdef double MIN_SLEEP = 20e-6, MAX_SLEEP = 200e-6  # seconds


cdef double monotonic() noexcept nogil:
    """Return seconds since some time in the past."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef bint give_way(double waited, double spin) noexcept nogil:
    """Let a moment pass after a test that failed; return whether it was a sleep.

    ``waited``: seconds so far; ``spin``: for how many of them the core is kept busy.
    """
    cdef timespec moment
    if waited < spin:
        return False
    if waited < spin + YIELD_TIME:
        sched_yield()
        return False
    moment.tv_sec = 0
    moment.tv_nsec = <long> (1e9 * min(max(MIN_SLEEP, (waited - spin - YIELD_TIME) / 8), MAX_SLEEP))
    nanosleep(&moment, NULL)
    return True


def wait_deaf(double waited, double spin):
    """Let a moment of a wait pass, as `Endpoint` does; no signal handler runs."""
    with nogil:
        give_way(waited, spin)


cdef struct Moved:  # between this rank and a peer
    Py_ssize_t sent, received  # bytes
    double seconds  # for which this rank has waited for messages to or from it


cdef struct WaitState:
    double began  # when the wait began; 0 until the first test has failed
    double next_poll  # when to poll
    double next_ping  # after how many seconds of waiting to ping


cdef shortened(message, Py_ssize_t nbytes, memory):
    """Return the beginning of a message made by ``memory``; on the host, what follows goes back to the system."""
    cdef np.PyArray_Dims shape
    if memory is not HOST:
        return message[:nbytes]
    shape.ptr, shape.len = <np.npy_intp *> &nbytes, 1
    np.PyArray_Resize(<np.ndarray> message, &shape, 0, np.NPY_CORDER)
    return message


@cython.final
@cython.freelist(16)
@cython.no_gc  # which would take the memory of a message under way for garbage, where nobody knows of either
cdef class Transfer:
    """A message under way: its memory, and its requests, one per piece."""

    cdef Endpoint endpoint
    cdef int peer
    cdef object data  # keeps the memory
    cdef Py_buffer buffer  # keeps it, too, where ``data`` is no array
    cdef char *address
    cdef Py_ssize_t nbytes
    cdef bint posted  # it is a receive of at most so many bytes
    cdef int received  # bytes of its piece that was complete last
    cdef MPI_Request single  # spares the common message, of one piece, an allocation
    cdef MPI_Request *requests
    cdef Py_ssize_t started, complete  # pieces

    def wait(self):
        self.endpoint.wait(self)

    cdef int take(self, Endpoint endpoint, int peer, data, int flags) except -1:
        """Take memory: an array on the host, what has a buffer, or what has an address on a device."""
        self.endpoint, self.peer, self.data = endpoint, peer, data
        self.requests = &self.single
        if np.PyArray_CheckExact(data) and np.PyArray_IS_C_CONTIGUOUS(data):
            self.address, self.nbytes = np.PyArray_BYTES(data), np.PyArray_NBYTES(data)
            return 0
        if PyObject_CheckBuffer(data):
            PyObject_GetBuffer(data, &self.buffer, flags)
        else:
            interface = data.__cuda_array_interface__
            address = <void *> <uintptr_t> interface["data"][0]
            PyBuffer_FillInfo(&self.buffer, data, address, data.nbytes, False, flags)
        self.address, self.nbytes = <char *> self.buffer.buf, self.buffer.len
        return 0

    cdef int test(self, bint *done) noexcept nogil:
        """Test the pieces in order; set ``done`` if all are complete, and return the first error of MPI.

        A piece that failed counts as complete: MPI is done with it.
        """
        cdef int code = MPI_SUCCESS
        cdef int flag = 1
        cdef MPI_Status status
        while flag and code == MPI_SUCCESS and self.complete < self.started:
            code = MPI_Test(&self.requests[self.complete], &flag, &status)
            if flag and code == MPI_SUCCESS and self.posted:
                MPI_Get_count(&status, MPI_BYTE, &self.received)
            if flag or code != MPI_SUCCESS:
                self.complete += 1
        done[0] = self.complete == self.started
        return code

    def __dealloc__(self):
        if self.complete < self.started:
            Py_INCREF(self.data)  # MPI may still use the memory: better lost than reused
            return
        if self.requests != &self.single:
            free(self.requests)
        PyBuffer_Release(&self.buffer)


cdef class Endpoint:
    """One rank's end of a communicator that nobody else uses.

    The subclass defines how to go on while waiting, ``poll(peer, waited, ping)``, which may raise; which error a code
    of MPI is, ``failure(code, peer)``; and that for a piece that is too long, ``oversized(source, nbytes)``.
    """

    cdef MPI_Comm comm
    cdef readonly int rank, size
    cdef public int tag  # of the current call's data
    cdef public double timeout  # seconds, of the current call
    cdef public object counters
    cdef readonly Py_ssize_t limit  # bytes in a piece
    cdef Py_ssize_t first  # the same of the first one of a message
    cdef readonly double spin  # seconds for which a wait keeps the core busy
    cdef set pending  # transfers that have started and were not waited for
    cdef Moved *moved  # by rank

    def __init__(self, uintptr_t address, Py_ssize_t limit, double spin):
        self.comm = (<MPI_Comm *> address)[0]
        MPI_Comm_rank(self.comm, &self.rank)
        MPI_Comm_size(self.comm, &self.size)
        self.limit, self.first = limit, min(limit, FIRST)
        self.spin = spin
        self.pending = set()
        self.moved = <Moved *> calloc(self.size, sizeof(Moved))
        if self.moved == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.moved)

    @property
    def closed(self):
        """Whether MPI cannot be used any more, or `detach` was called."""
        return self.comm == MPI_COMM_NULL or not usable()

    # -- data -------------------------------------------------------------------------------------------------------

    def isend(self, data, int to, memory=HOST):
        return self.start_send(data, to, memory)

    def receive(self, int source, memory=HOST, Py_ssize_t expected=0):
        return self.finish_receive(self.post_receive(source, memory, expected), source, memory, expected)

    def exchange(self, data, int to, int source, memory=HOST, Py_ssize_t expected=0):
        cdef Transfer posted = self.post_receive(source, memory, expected)
        try:
            sent = self.start_send(data, to, memory)
        except BaseException:
            self.cancel(posted)
            raise
        message = self.finish_receive(posted, source, memory, expected)
        self.wait(sent)
        return message

    def exchange_all(self, sends, sources, memory=HOST, Py_ssize_t expected=0):
        cdef list posted = [], sent = []
        cdef Transfer transfer
        try:
            for source in sources:
                posted.append(self.post_receive(source, memory, expected))
            for to, data in sends:
                sent.append(self.start_send(data, to, memory))
            messages = self.finish_all(posted, list(sources), memory, expected)
        except BaseException:
            for transfer in posted:
                self.cancel(transfer)
            raise
        for transfer in sent:
            self.wait(transfer)
        return messages

    cdef Transfer start_send(self, data, int to, memory):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        transfer.take(self, to, data, PyBUF_SIMPLE)
        self.send_pieces(transfer, self.tag, self.first, memory)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += transfer.nbytes
        self.moved[to].sent += transfer.nbytes
        return transfer

    cdef int send_pieces(self, Transfer transfer, int tag, Py_ssize_t first, memory) except -1:
        """Start sending the memory of ``transfer``: ``first`` bytes, then pieces of `limit`, the last one not full."""
        cdef Py_ssize_t begin = 0, length = min(first, transfer.nbytes)
        cdef int code
        if transfer.nbytes >= first:
            pieces = 2 + (transfer.nbytes - first) // self.limit
            transfer.requests = <MPI_Request *> malloc(pieces * sizeof(MPI_Request))
            if transfer.requests == NULL:
                raise MemoryError
        self.pending.add(transfer)
        while True:
            if memory is not HOST:  # a piece leaves while the next one is still being copied
                memory.ready(transfer.data, begin + length)
            with nogil:
                code = MPI_Isend(transfer.address + begin, <int> length, MPI_BYTE, transfer.peer, tag, self.comm,
                                 &transfer.requests[transfer.started])
            if code != MPI_SUCCESS:
                raise self.failure(code, transfer.peer)
            transfer.started += 1
            if length < (self.limit if begin else first):
                return 0
            begin += length
            length = min(self.limit, transfer.nbytes - begin)

    cdef Transfer post_receive(self, int source, memory, Py_ssize_t expected):
        """Post the receive of the first piece of a message; return None for a message to a device, which is probed for.

        There is room for ``expected`` bytes, so that a message of no more pieces than expected stays where it is.
        """
        cdef Transfer transfer
        cdef np.npy_intp room = max(expected, self.first)
        cdef int code
        if memory is not HOST:
            return None
        transfer = Transfer.__new__(Transfer)
        transfer.take(self, source, np.PyArray_EMPTY(1, &room, np.NPY_UINT8, 0), PyBUF_WRITABLE)
        transfer.posted = True
        with nogil:
            code = MPI_Irecv(transfer.address, <int> self.first, MPI_BYTE, source, self.tag, self.comm,
                             &transfer.single)
        if code != MPI_SUCCESS:
            raise self.failure(code, source)
        transfer.started = 1
        self.pending.add(transfer)
        return transfer

    cdef int cancel(self, Transfer posted) except -1:
        """Take back a receive. If its message is on the way already, that still comes there."""
        cdef bint done
        if posted is not None and posted.complete < posted.started:
            with nogil:
                MPI_Cancel(&posted.single)
                posted.test(&done)
            if done:
                self.pending.discard(posted)
        return 0

    cdef finish_receive(self, Transfer posted, int source, memory, Py_ssize_t expected):
        """Receive the pieces of one message, in memory that ``memory`` makes.

        Its length is not announced, and nothing is allocated on a peer's word, but for what a piece has brought: for
        several pieces there is room for ``expected`` bytes, and for more if more have come.
        """
        cdef MPI_Message piece
        cdef Py_ssize_t length, end, room, full = self.first
        if posted is None:
            length = self.probe(source, full, &piece)
            room = length if length < full else max(expected, length)
            message = self.enlarged(None, room, 0, memory, length, &piece, source)
            self.wait(self.start_matched(message[:length], &piece, source))
        else:
            try:
                self.wait(posted)
            except BaseException:
                self.cancel(posted)
                raise
            message, length = posted.data, posted.received
        end = length
        while length == full:
            memory.landed(message, end - length, end)
            full = self.limit
            length = self.probe(source, full, &piece)
            if end + length > len(message):
                room = max(end + length, 2 * len(message))
                message = self.enlarged(message, room, end, memory, length, &piece, source)
            self.wait(self.start_matched(message[end : end + length], &piece, source))
            end += length
        if end > self.first:
            memory.landed(message, end - length, end)
        self.counters.messages_received += 1
        self.counters.bytes_received += end
        self.moved[source].received += end
        return message if end == len(message) else shortened(message, end, memory)

    cdef list finish_all(self, list posted, list sources, memory, Py_ssize_t expected):
        """Receive one message from each source: as `finish_receive`, but the later pieces of all are under way at once."""
        cdef MPI_Message piece
        cdef Transfer transfer
        cdef Py_ssize_t i, length, end, number = len(sources)
        cdef list messages = [], ends = [], unfinished = [], started
        if memory is not HOST:
            return [self.finish_receive(posted[i], sources[i], memory, expected) for i in range(number)]
        for i in range(number):
            transfer = posted[i]
            self.wait(transfer)
            messages.append(transfer.data)
            ends.append(transfer.received)
            if transfer.received == self.first:
                unfinished.append(i)
        while unfinished:
            started = []
            for i in unfinished:
                end = ends[i]
                length = self.probe(sources[i], self.limit, &piece)
                if end + length > len(messages[i]):
                    room = max(end + length, 2 * len(messages[i]))
                    messages[i] = self.enlarged(messages[i], room, end, memory, length, &piece, sources[i])
                started.append(self.start_matched(messages[i][end : end + length], &piece, sources[i]))
                ends[i] = end + length
            for transfer in started:
                self.wait(transfer)
            unfinished = [i for i, transfer in zip(unfinished, started) if transfer.nbytes == self.limit]
        for i in range(number):
            self.counters.messages_received += 1
            self.counters.bytes_received += ends[i]
            if ends[i] < len(messages[i]):
                messages[i] = shortened(messages[i], ends[i], memory)
        return messages

    cdef enlarged(self, message, Py_ssize_t room, Py_ssize_t end, memory, Py_ssize_t length, MPI_Message *piece,
                  int source):
        """Return memory of ``room`` bytes with the ``end`` bytes of ``message``, for a piece that has been matched."""
        try:
            larger = memory.empty(room)
            if end:
                memory.move(message[:end], larger)
            return larger
        except BaseException:  # of a signal handler, or there is too little memory
            self.start_matched(bytearray(length), piece, source)  # so that MPI and the sender can forget it
            raise

    cdef Py_ssize_t probe(self, int source, Py_ssize_t full, MPI_Message *message) except -1:
        """Wait for a piece of at most ``full`` bytes; return its length."""
        cdef WaitState state
        cdef MPI_Status status
        cdef int code, nbytes
        cdef int found = 0
        state.began = 0
        while not found:
            with nogil:
                while True:
                    code = MPI_Improbe(source, self.tag, self.comm, &found, message, &status)
                    if found or code != MPI_SUCCESS or self.back_off(&state):
                        break
            if code != MPI_SUCCESS:
                raise self.failure(code, source)
            if not found:
                self.check_and_poll(&state, source)
        self.count_wait(&state, source)
        MPI_Get_count(&status, MPI_BYTE, &nbytes)
        if not 0 <= nbytes <= full:  # MPI keeps it
            raise self.oversized(source, nbytes)
        return nbytes

    cdef Transfer start_matched(self, data, MPI_Message *message, int source):
        """Start receiving a message that a probe has found, into ``data``, which has its length."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        cdef int code
        transfer.take(self, source, data, PyBUF_WRITABLE)
        with nogil:
            code = MPI_Imrecv(transfer.address, <int> transfer.nbytes, MPI_BYTE, message, &transfer.single)
        if code != MPI_SUCCESS:
            raise self.failure(code, source)
        transfer.started = 1
        self.pending.add(transfer)
        return transfer

    def traffic(self, int peer):
        """Return bytes sent to a rank, bytes received from it, and seconds in which messages of both were waited for.
        """
        cdef Moved *moved = &self.moved[peer]
        return moved.sent, moved.received, moved.seconds

    # -- waiting ----------------------------------------------------------------------------------------------------

    cdef int wait(self, Transfer transfer) except -1:
        cdef WaitState state
        cdef int code, kind
        cdef bint done = False
        if transfer not in self.pending:
            return 0  # a second wait
        state.began = 0
        while not done:
            with nogil:
                while True:
                    code = transfer.test(&done)
                    if done or code != MPI_SUCCESS or self.back_off(&state):
                        break
            if code != MPI_SUCCESS:
                MPI_Error_class(code, &kind)
                if kind == MPI_ERR_TRUNCATE:
                    raise self.oversized(transfer.peer, -1)
                raise self.failure(code, transfer.peer)
            if not done:
                self.check_and_poll(&state, transfer.peer)
        self.count_wait(&state, transfer.peer)
        self.pending.discard(transfer)
        return 0

    cdef void count_wait(self, WaitState *state, int peer) noexcept:
        """Count a wait that has ended."""
        if state.began:
            self.moved[peer].seconds += monotonic() - state.began

    cdef bint back_off(self, WaitState *state) noexcept nogil:
        """Let a moment pass after a test that failed; return whether it is time for `check_and_poll`."""
        cdef double now = monotonic()
        cdef int found = 0
        if state.began == 0:
            state.began = now
            state.next_poll = now + min(POLL_INTERVAL, self.timeout)
            state.next_ping = PING_INTERVAL
        if not give_way(now - state.began, self.spin):
            return now >= state.next_poll
        if MPI_Iprobe(MPI_ANY_SOURCE, CONTROL, self.comm, &found, MPI_STATUS_IGNORE) != MPI_SUCCESS:
            return True
        return found or now >= state.next_poll

    cdef int check_and_poll(self, WaitState *state, int peer) except -1:
        """Handle signals, then let the subclass `poll`."""
        cdef double now = monotonic()
        cdef double waited = now - state.began
        cdef bint ping = waited >= state.next_ping
        PyErr_CheckSignals()
        if ping:
            state.next_ping = 2 * state.next_ping + PING_INTERVAL  # the time between pings doubles
        state.next_poll = min(now + POLL_INTERVAL, state.began + self.timeout)
        self.poll(peer, waited, ping)
        return 0

    # -- control messages and what calls leave behind ---------------------------------------------------------------

    def send_control(self, bytes message, int to):
        """Send a control message; it must be short enough to leave at once."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        transfer.take(self, to, message, PyBUF_SIMPLE)
        self.send_pieces(transfer, CONTROL, transfer.nbytes + 1, HOST)  # always in one piece

    def recv_control(self, int max_bytes):
        """Return the next control message that has arrived, as (rank, length, bytes), or None.

        One of more than ``max_bytes`` is left to MPI, and its bytes are empty: a peer may never send them.
        """
        cdef MPI_Message message
        cdef MPI_Status status
        cdef int code
        cdef int nbytes = 0
        cdef int found = 0
        with nogil:
            code = MPI_Iprobe(MPI_ANY_SOURCE, CONTROL, self.comm, &found, MPI_STATUS_IGNORE)
            if found and code == MPI_SUCCESS:
                code = MPI_Improbe(MPI_ANY_SOURCE, CONTROL, self.comm, &found, &message, &status)
        if code == MPI_SUCCESS and found:
            MPI_Get_count(&status, MPI_BYTE, &nbytes)
            text = b""
            if 0 < nbytes <= max_bytes:
                text = PyBytes_FromStringAndSize(NULL, nbytes)
                code = MPI_Mrecv(PyBytes_AS_STRING(text), nbytes, MPI_BYTE, &message, MPI_STATUS_IGNORE)
        if code != MPI_SUCCESS:
            raise self.failure(code, -1)
        return (status.MPI_SOURCE, nbytes, text) if found else None

    def discard(self, int tag):
        """Receive and forget what has arrived with ``tag``, so that its senders can free their memory."""
        cdef MPI_Message message
        cdef MPI_Status status
        cdef int nbytes
        cdef int found = 1
        while found:
            found = 0
            if MPI_Improbe(MPI_ANY_SOURCE, tag, self.comm, &found, &message, &status) == MPI_SUCCESS and found:
                MPI_Get_count(&status, MPI_BYTE, &nbytes)
                if 0 <= nbytes <= self.limit:
                    self.start_matched(bytearray(nbytes), &message, status.MPI_SOURCE)

    def reap(self):
        """Release transfers that earlier calls left and that are complete by now; return how many are not.

        Never called during a wait: it would take from it the transfer that is waited for, and its error.
        """
        cdef Transfer transfer
        cdef bint done
        for transfer in list(self.pending) if self.pending else ():
            transfer.test(&done)
            if done:
                self.pending.discard(transfer)
        return len(self.pending)

    def detach(self, bint broken=False):
        """Hand over to MPI the transfers that nobody waits for: it completes them, and their memory is never reused.

        The communicator is not used any more. Where it is ``broken`` they end with an error instead, which MPI would
        take for fatal where their requests were freed: these are left as they are.
        """
        cdef Transfer transfer
        cdef Py_ssize_t i
        self.reap()
        for transfer in self.pending if not broken else ():
            for i in range(transfer.complete, transfer.started):
                if transfer.requests[i] != MPI_REQUEST_NULL:
                    MPI_Request_free(&transfer.requests[i])
        self.pending = set()
        self.comm = MPI_COMM_NULL
