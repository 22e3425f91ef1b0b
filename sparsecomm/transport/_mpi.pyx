# cython: language_level=3, boundscheck=False, wraparound=False
"""`Endpoint`: the part of the MPI transport that sends, receives and waits, in C.

A message travels in pieces. The first piece has at most `FIRST` bytes, and its receive is posted before it arrives. The
memory for later, longer pieces is allocated when they arrive. If a piece is full, another one follows.

All operations are non-blocking. A wait tests MPI in a busy loop for some tens of microseconds, then yields the core
between tests, then sleeps between them. It regularly calls `poll` of the Python class, which raises an exception to end
the wait. MPI is called without the GIL.
"""

cimport cython
cimport numpy as np
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE, MPI_BYTE, MPI_COMM_NULL, MPI_ERR_TRUNCATE, MPI_REQUEST_NULL, MPI_STATUS_IGNORE, MPI_SUCCESS,
    MPI_Cancel, MPI_Comm, MPI_Comm_rank, MPI_Comm_size, MPI_Error_class, MPI_Finalized, MPI_Get_count, MPI_Improbe,
    MPI_Imrecv, MPI_Iprobe, MPI_Irecv, MPI_Isend, MPI_Message, MPI_Mrecv, MPI_Request, MPI_Request_free, MPI_Status,
    MPI_Test,
)
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec
from posix.unistd cimport getpid

from sparsecomm.signals import poll as poll_signals
from sparsecomm.transport.base import HOST

np.import_array()

cdef extern from "<sched.h>" nogil:
    int sched_yield()

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

built_with = SC_BUILT_WITH.decode()  # name and version of the MPI whose headers were used
cdef int PROCESS = getpid()


def usable():
    """Return whether MPI can be used: it is not finalized, and this process is not a fork."""
    cdef int finalized = 0
    MPI_Finalized(&finalized)
    return getpid() == PROCESS and not finalized


cdef enum:
    CONTROL = 0  # tag of control messages; data messages have higher tags
    FIRST = 65_536  # bytes in the first piece of a message

cdef double POLL_INTERVAL = 0.05  # seconds between checks of signals, the timeout and control messages
cdef double YIELD_TIME = 1e-3  # seconds for which a wait yields to other processes before it sleeps
cdef double MIN_SLEEP = 20e-6, MAX_SLEEP = 200e-6  # seconds


cdef double monotonic() noexcept nogil:
    """Return seconds since an arbitrary time."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef bint give_way(double waited, double spin) noexcept nogil:
    """Pause once, after ``waited`` seconds of a wait: spin, later yield, later sleep. Return whether it slept."""
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


def wait_without_signals(double waited, double spin):
    """Pause once during a wait, as `Endpoint` does. No signal handler runs."""
    with nogil:
        give_way(waited, spin)


cdef struct PeerTraffic:
    Py_ssize_t sent, received  # bytes
    double seconds  # spent waiting for messages to or from the peer


cdef struct WaitState:
    double began  # time at which the first test failed; 0 before
    double next_poll  # time of the next poll
    double next_ping  # the latest result of `poll`


cdef shortened(message, Py_ssize_t nbytes, memory):
    """Return the first ``nbytes`` of a message. In host memory, free the rest."""
    cdef np.PyArray_Dims shape
    if memory is not HOST:
        return message[:nbytes]
    shape.ptr, shape.len = <np.npy_intp *> &nbytes, 1
    np.PyArray_Resize(<np.ndarray> message, &shape, 0, np.NPY_CORDER)
    return message


@cython.final
@cython.freelist(16)
@cython.no_gc  # the collector could free memory that only MPI still uses
cdef class Transfer:
    """A message in flight, with its memory and one MPI request per piece."""

    cdef Endpoint endpoint
    cdef int peer
    cdef object data  # keeps the memory alive
    cdef Py_buffer buffer  # unused if ``data`` is an array
    cdef char *address
    cdef Py_ssize_t nbytes
    cdef bint posted  # this is the receive of a first piece, which may be shorter than ``nbytes``
    cdef int received  # bytes in that piece
    cdef MPI_Request single  # used for a message of one piece, to avoid an allocation
    cdef MPI_Request *requests
    cdef Py_ssize_t started, complete  # numbers of pieces

    def wait(self):
        self.endpoint.wait(self)

    cdef int bind(self, Endpoint endpoint, int peer, data, int flags) except -1:
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
        """Test the pieces in order, set ``done`` to whether all are complete, and return MPI's first error code."""
        cdef int code = MPI_SUCCESS
        cdef int flag = 1
        cdef MPI_Status status
        while flag and code == MPI_SUCCESS and self.complete < self.started:
            code = MPI_Test(&self.requests[self.complete], &flag, &status)
            if flag and code == MPI_SUCCESS and self.posted:
                MPI_Get_count(&status, MPI_BYTE, &self.received)
            if flag or code != MPI_SUCCESS:  # MPI no longer uses the memory of a failed piece
                self.complete += 1
        done[0] = self.complete == self.started
        return code

    def __dealloc__(self):
        if self.complete < self.started:
            Py_INCREF(self.data)  # leak the memory, because MPI may still use it
            return
        if self.requests != &self.single:
            free(self.requests)
        PyBuffer_Release(&self.buffer)


cdef class Endpoint:
    """Sends and receives on a communicator that nobody else uses.

    A subclass defines three methods. ``poll(peer, waited, next_ping)`` raises to end a wait; its result is the next
    ``next_ping``. ``failure(code, peer)`` returns the error for an MPI error code, and ``oversized(source, nbytes)``
    the error for a piece that is too long.
    """

    cdef MPI_Comm comm
    cdef readonly int rank, size
    cdef public int tag  # of the current call's data
    cdef public double timeout  # seconds, of the current call
    cdef public object counters
    cdef readonly Py_ssize_t limit  # maximum bytes in a piece
    cdef Py_ssize_t first  # maximum bytes in the first piece of a message
    cdef readonly double spin  # seconds of busy waiting
    cdef set pending  # transfers that were started and not waited for
    cdef PeerTraffic *per_peer  # indexed by rank

    def __init__(self, uintptr_t address, Py_ssize_t limit, double spin):
        self.comm = (<MPI_Comm *> address)[0]
        MPI_Comm_rank(self.comm, &self.rank)
        MPI_Comm_size(self.comm, &self.size)
        self.limit, self.first = limit, min(limit, FIRST)
        self.spin = spin
        self.pending = set()
        self.per_peer = <PeerTraffic *> calloc(self.size, sizeof(PeerTraffic))
        if self.per_peer == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.per_peer)

    @property
    def closed(self):
        return self.comm == MPI_COMM_NULL or not usable()

    # -- data -------------------------------------------------------------------------------------------------------

    def isend(self, data, int to, memory=HOST):
        return self.start_send(data, to, memory)

    def receive(self, int source, memory=HOST, Py_ssize_t expected=0):
        cdef Transfer posted = self.post_receive(source, memory, expected)
        try:
            return self.finish_receive(posted, source, memory, expected)
        except BaseException:
            self.cancel(posted)
            raise

    def exchange(self, data, int to, int source, memory=HOST, Py_ssize_t expected=0):
        cdef Transfer posted = self.post_receive(source, memory, expected)
        try:
            sent = self.start_send(data, to, memory)
            message = self.finish_receive(posted, source, memory, expected)
        except BaseException:
            self.cancel(posted)
            raise
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
        transfer.bind(self, to, data, PyBUF_SIMPLE)
        self.send_pieces(transfer, self.tag, self.first, memory)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += transfer.nbytes
        self.per_peer[to].sent += transfer.nbytes
        return transfer

    cdef int send_pieces(self, Transfer transfer, int tag, Py_ssize_t first, memory) except -1:
        """Start sending a piece of ``first`` bytes, then pieces of `limit` bytes. The last piece is not full."""
        cdef Py_ssize_t begin = 0, length = min(first, transfer.nbytes)
        cdef int code
        if transfer.nbytes >= first:
            pieces = 2 + (transfer.nbytes - first) // self.limit
            transfer.requests = <MPI_Request *> malloc(pieces * sizeof(MPI_Request))
            if transfer.requests == NULL:
                raise MemoryError
        self.pending.add(transfer)
        while True:
            if memory is not HOST:  # wait for this piece only; the next one may still be copied
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
        """Post the receive of the first piece, with room for ``expected`` bytes; None unless ``memory`` is `HOST`."""
        cdef Transfer transfer
        cdef np.npy_intp room = max(expected, self.first)
        cdef int code
        if memory is not HOST:
            return None
        transfer = Transfer.__new__(Transfer)
        transfer.bind(self, source, np.PyArray_EMPTY(1, &room, np.NPY_UINT8, 0), PyBUF_WRITABLE)
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
        """Cancel a posted receive that is not complete. MPI may still write a message in flight to its memory."""
        cdef bint done
        if posted is not None and posted.complete < posted.started:
            with nogil:
                MPI_Cancel(&posted.single)
                posted.test(&done)
            if done:
                self.pending.discard(posted)
        return 0

    cdef finish_receive(self, Transfer posted, int source, memory, Py_ssize_t expected):
        """Receive one message. Its first piece may be ``posted``."""
        message, length = self.first_piece(posted, source, memory, expected)
        if length < self.first:
            return self.received(message, length, source, memory)
        return self.later_pieces([message], [length], [source], memory)[0]

    cdef list finish_all(self, list posted, list sources, memory, Py_ssize_t expected):
        """Receive one message from each source. The later pieces of all messages are in flight at the same time."""
        cdef list messages = [], lengths = []
        for i, source in enumerate(sources):
            message, length = self.first_piece(posted[i], source, memory, expected)
            messages.append(message)
            lengths.append(length)
        return self.later_pieces(messages, lengths, sources, memory)

    cdef tuple first_piece(self, Transfer posted, int source, memory, Py_ssize_t expected):
        """Receive the first piece of a message; return the memory for the message, and the bytes in the piece."""
        cdef MPI_Message piece
        cdef Py_ssize_t length
        if posted is None:
            length = self.probe(source, self.first, &piece)
            room = length if length < self.first else max(expected, length)
            message = self.enlarged(None, room, 0, memory, length, &piece, source)
            self.wait(self.start_matched(message[:length], &piece, source))
            return message, length
        self.wait(posted)
        return posted.data, posted.received

    cdef list later_pieces(self, list messages, list ends, list sources, memory):
        """Receive the rest of messages of which ``ends`` bytes have arrived; return the complete messages."""
        cdef Transfer transfer
        cdef list started, unfinished = [i for i, end in enumerate(ends) if end == self.first]
        for i in unfinished:
            memory.landed(messages[i], 0, self.first)
        while unfinished:
            started = []
            for i in unfinished:
                messages[i], transfer = self.start_piece(messages[i], ends[i], sources[i], memory)
                started.append((i, transfer))
            unfinished = []
            for i, transfer in started:
                self.wait(transfer)
                memory.landed(messages[i], ends[i], ends[i] + transfer.nbytes)
                ends[i] += transfer.nbytes
                if transfer.nbytes == self.limit:
                    unfinished.append(i)
        return [self.received(message, end, source, memory)
                for message, end, source in zip(messages, ends, sources)]

    cdef received(self, message, Py_ssize_t nbytes, int source, memory):
        """Count a complete message of ``nbytes`` and return it without unused memory."""
        self.counters.messages_received += 1
        self.counters.bytes_received += nbytes
        self.per_peer[source].received += nbytes
        return message if nbytes == len(message) else shortened(message, nbytes, memory)

    cdef tuple start_piece(self, message, Py_ssize_t end, int source, memory):
        """Start receiving the next piece at byte ``end``. Return the memory, enlarged if needed, and the transfer."""
        cdef MPI_Message piece
        cdef Py_ssize_t length = self.probe(source, self.limit, &piece)
        if end + length > len(message):
            message = self.enlarged(message, max(end + length, 2 * len(message)), end, memory, length, &piece, source)
        return message, self.start_matched(message[end : end + length], &piece, source)

    cdef enlarged(self, message, Py_ssize_t room, Py_ssize_t end, memory, Py_ssize_t length, MPI_Message *piece,
                  int source):
        """Return ``room`` bytes of new memory that begin with the first ``end`` bytes of ``message``.

        If this fails, receive and discard the matched ``piece`` of ``length`` bytes, so that its sender can free it.
        """
        try:
            larger = memory.empty(room)
            if end:
                memory.move(message[:end], larger)
            return larger
        except BaseException:  # such as a MemoryError
            self.start_matched(bytearray(length), piece, source)
            raise

    cdef Py_ssize_t probe(self, int source, Py_ssize_t full, MPI_Message *message) except -1:
        """Wait for a piece, match it and return its length. Raise if it has more than ``full`` bytes."""
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
        if not 0 <= nbytes <= full:  # the piece is never received
            raise self.oversized(source, nbytes)
        return nbytes

    cdef Transfer start_matched(self, data, MPI_Message *message, int source):
        """Start receiving a matched piece into ``data``, which has the length of the piece."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        cdef int code
        transfer.bind(self, source, data, PyBUF_WRITABLE)
        with nogil:
            code = MPI_Imrecv(transfer.address, <int> transfer.nbytes, MPI_BYTE, message, &transfer.single)
        if code != MPI_SUCCESS:
            raise self.failure(code, source)
        transfer.started = 1
        self.pending.add(transfer)
        return transfer

    def traffic(self, int peer):
        """Return the bytes sent to a rank, the bytes received from it, and the seconds of waiting for it."""
        cdef PeerTraffic *found = &self.per_peer[peer]
        return found.sent, found.received, found.seconds

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
        if state.began:
            self.per_peer[peer].seconds += monotonic() - state.began

    cdef bint back_off(self, WaitState *state) noexcept nogil:
        """Pause after a failed test; return whether it is time for `check_and_poll`."""
        cdef double now = monotonic()
        cdef int found = 0
        if state.began == 0:
            state.began = now
            state.next_poll = now + min(POLL_INTERVAL, self.timeout)
            state.next_ping = 0.0
        if not give_way(now - state.began, self.spin):
            return now >= state.next_poll
        if MPI_Iprobe(MPI_ANY_SOURCE, CONTROL, self.comm, &found, MPI_STATUS_IGNORE) != MPI_SUCCESS:
            return True
        return found or now >= state.next_poll

    cdef int check_and_poll(self, WaitState *state, int peer) except -1:
        """Run the handlers of signals that have arrived, then call `poll`."""
        cdef double now = monotonic()
        cdef double waited = now - state.began
        poll_signals()
        state.next_poll = min(now + POLL_INTERVAL, state.began + self.timeout)
        state.next_ping = self.poll(peer, waited, state.next_ping)
        return 0

    # -- control messages, and cleaning up after calls ----------------------------------------------------------------

    def send_control(self, bytes message, int to):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        transfer.bind(self, to, message, PyBUF_SIMPLE)
        self.send_pieces(transfer, CONTROL, transfer.nbytes + 1, HOST)  # always in one piece

    def recv_control(self, int max_bytes):
        """Return the next control message that has arrived, as (rank, length, bytes), or None.

        A message of more than ``max_bytes`` is returned empty: its sender may never send all of it.
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
        """Receive and discard all pieces that have arrived with ``tag``, so that their senders can free them."""
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
        """Forget complete transfers of earlier calls; return the number of incomplete ones.

        Must not be called during a wait, which would miss the error of its transfer.
        """
        cdef Transfer transfer
        cdef bint done
        for transfer in list(self.pending) if self.pending else ():
            transfer.test(&done)
            if done:
                self.pending.discard(transfer)
        return len(self.pending)

    def detach(self, bint broken=False):
        """Stop using the communicator. MPI completes pending transfers; their memory is never reused.

        Do not free the requests of a ``broken`` communicator: they end with errors, which are fatal for freed requests.
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
