# cython: language_level=3, boundscheck=False, wraparound=False
"""The part of the MPI transport that must be quick: sends, receives, and the way in which a rank waits.

Everything is non-blocking underneath. A wait tests MPI for a few tens of microseconds, then lets other processes
run between tests, then sleeps. In the slow part it calls `poll` of the Python class now and then, which decides
whether to go on. MPI is called without the GIL.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE, MPI_BYTE, MPI_COMM_NULL, MPI_REQUEST_NULL, MPI_STATUS_IGNORE, MPI_SUCCESS,
    MPI_Comm, MPI_Get_count, MPI_Improbe, MPI_Imrecv, MPI_Iprobe, MPI_Isend, MPI_Message, MPI_Mrecv,
    MPI_Request, MPI_Request_free, MPI_Status, MPI_Test, MPI_Comm_rank, MPI_Comm_size,
)

from sparsecomm.transport._waiting cimport MIN_SLEEP, give_way, monotonic
from sparsecomm.transport.memory import HOST

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

cdef enum:
    CONTROL = 0  # the tag of control messages; those of data are above

cdef double POLL_INTERVAL = 0.05  # seconds between looks at signals, the clock and control messages
cdef double PING_INTERVAL = 0.25  # seconds until the peer is told that it is waited for; doubles every time


cdef int get_buffer(data, Py_buffer *view, int flags) except -1:
    """Fill ``view`` with the bytes of an array in host memory, or in that of a device, which has no buffer protocol.

    It holds a reference to the array until `PyBuffer_Release`, which does nothing where ``view`` is still all zeros.
    """
    if PyObject_CheckBuffer(data):
        return PyObject_GetBuffer(data, view, flags)
    interface = data.__cuda_array_interface__
    return PyBuffer_FillInfo(view, data, <void *> <uintptr_t> interface["data"][0], data.nbytes, False, flags)


cdef struct WaitState:
    double began  # when the wait began; 0 until the first test has failed
    double next_poll  # when to poll
    double next_ping  # after how many seconds of waiting to ping
    long sleep  # nanoseconds


@cython.no_gc  # which would take the memory of a message under way for garbage, where nobody knows of either
cdef class Transfer:
    """A message under way: its requests, one per piece, and a reference to its memory until they are complete."""

    cdef Endpoint endpoint
    cdef int peer
    cdef Py_buffer buffer  # keeps the memory, also that of a device
    cdef object data
    cdef MPI_Request single  # spares the common message, of one piece, an allocation
    cdef MPI_Request *requests
    cdef Py_ssize_t started, complete  # pieces

    def wait(self):
        self.endpoint.wait(self)

    cdef int test(self, bint *done) noexcept nogil:
        """Test the pieces in order; set ``done`` if all are complete, and return the first error of MPI.

        A piece that failed counts as complete: MPI is done with it.
        """
        cdef int code = MPI_SUCCESS
        cdef int flag = 1
        while flag and code == MPI_SUCCESS and self.complete < self.started:
            code = MPI_Test(&self.requests[self.complete], &flag, MPI_STATUS_IGNORE)
            if flag or code != MPI_SUCCESS:
                self.complete += 1
        done[0] = self.complete == self.started
        return code

    def __dealloc__(self):
        if self.complete < self.started:
            return  # MPI may still use the memory: better lost than reused
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
    cdef readonly Py_ssize_t limit  # bytes in one piece; a piece of this length announces another
    cdef double spin  # seconds for which a wait keeps the core busy
    cdef list pending  # transfers that have started and were not waited for

    def __init__(self, uintptr_t address, Py_ssize_t limit, double spin, counters):
        self.comm = (<MPI_Comm *> address)[0]
        MPI_Comm_rank(self.comm, &self.rank)
        MPI_Comm_size(self.comm, &self.size)
        self.limit = limit
        self.spin = spin
        self.counters = counters
        self.pending = []

    # -- data -------------------------------------------------------------------------------------------------------

    def isend(self, data, int to, memory=HOST):
        return self.start_send(data, to, memory)

    def receive(self, int source, memory=HOST, Py_ssize_t expected=0):
        return self.receive_message(source, memory, expected)

    def exchange(self, data, int to, int source, memory=HOST, Py_ssize_t expected=0):
        cdef Transfer transfer = self.start_send(data, to, memory)
        message = self.receive_message(source, memory, expected)
        self.wait(transfer)
        return message

    cdef Transfer start_send(self, data, int to, memory):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        get_buffer(data, &transfer.buffer, PyBUF_SIMPLE)
        transfer.data = data
        transfer.endpoint = self
        self.send_pieces(transfer, to, self.tag, self.limit, memory)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += transfer.buffer.len
        return transfer

    cdef int send_pieces(self, Transfer transfer, int to, int tag, Py_ssize_t limit, memory) except -1:
        """Start sending the buffer of ``transfer``, in pieces of ``limit`` bytes and a shorter one, maybe empty."""
        cdef char *address = <char *> transfer.buffer.buf
        cdef Py_ssize_t nbytes = transfer.buffer.len
        cdef Py_ssize_t pieces = nbytes // limit + 1
        cdef Py_ssize_t i
        cdef int code = MPI_SUCCESS
        transfer.peer = to
        transfer.requests = &transfer.single
        if pieces > 1:
            transfer.requests = <MPI_Request *> malloc(pieces * sizeof(MPI_Request))
            if transfer.requests == NULL:
                raise MemoryError
        self.pending.append(transfer)
        for i in range(pieces):
            if memory is not HOST:  # a piece leaves while the next one is still being copied
                memory.ready(transfer.data, min(nbytes, (i + 1) * limit))
            with nogil:
                code = MPI_Isend(address + i * limit, <int> min(limit, nbytes - i * limit), MPI_BYTE, to, tag,
                                 self.comm, &transfer.requests[i])
            if code != MPI_SUCCESS:
                break
            transfer.started += 1
        if code != MPI_SUCCESS:
            raise self.failure(code, to)
        return 0

    cdef receive_message(self, int source, memory, Py_ssize_t expected):
        """Receive the pieces of one message, in memory that ``memory`` makes.

        Its length is not announced, and nothing is allocated on a peer's word, but for what a piece has brought: for
        several pieces there is room for ``expected`` bytes, and for more if more have come.
        """
        cdef MPI_Message piece
        cdef Py_ssize_t length = self.probe(source, &piece)
        cdef Py_ssize_t end = length
        try:
            message = memory.empty(length if length < self.limit else max(expected, length))
        except BaseException:  # of a signal handler, or there is too little memory
            self.start_receive(bytearray(length), &piece, source)  # so that MPI and the sender can forget it
            raise
        self.wait(self.start_receive(message[:length], &piece, source))
        while length == self.limit:
            memory.landed(message, end - length, end)
            length = self.probe(source, &piece)
            if end + length > len(message):
                try:
                    larger = memory.empty(max(end + length, 2 * len(message)))
                    memory.move(message[:end], larger)
                except BaseException:
                    self.start_receive(bytearray(length), &piece, source)
                    raise
                message = larger
            self.wait(self.start_receive(message[end : end + length], &piece, source))
            end += length
        if end > self.limit:
            memory.landed(message, end - length, end)
        self.counters.messages_received += 1
        self.counters.bytes_received += end
        return message if end == len(message) else message[:end]

    cdef Py_ssize_t probe(self, int source, MPI_Message *message) except -1:
        """Wait for a piece; return its length."""
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
        MPI_Get_count(&status, MPI_BYTE, &nbytes)
        if not 0 <= nbytes <= self.limit:  # MPI keeps it
            raise self.oversized(source, nbytes)
        return nbytes

    cdef Transfer start_receive(self, data, MPI_Message *message, int source):
        """Start receiving a message that a probe has found, into ``data``, which has its length."""
        cdef Transfer transfer = Transfer.__new__(Transfer)
        cdef int code
        get_buffer(data, &transfer.buffer, PyBUF_WRITABLE)
        transfer.data = data
        transfer.endpoint = self
        transfer.peer = source
        transfer.requests = &transfer.single
        with nogil:
            code = MPI_Imrecv(transfer.buffer.buf, <int> transfer.buffer.len, MPI_BYTE, message, &transfer.single)
        if code != MPI_SUCCESS:
            raise self.failure(code, source)
        transfer.started = 1
        self.pending.append(transfer)
        return transfer

    # -- waiting ----------------------------------------------------------------------------------------------------

    cdef int wait(self, Transfer transfer) except -1:
        cdef WaitState state
        cdef int code
        cdef bint done = transfer.complete == transfer.started
        if done and transfer not in self.pending:
            return 0  # a second wait
        state.began = 0
        while not done:
            with nogil:
                while True:
                    code = transfer.test(&done)
                    if done or code != MPI_SUCCESS or self.back_off(&state):
                        break
            if code != MPI_SUCCESS:
                raise self.failure(code, transfer.peer)
            if not done:
                self.check_and_poll(&state, transfer.peer)
        self.pending.remove(transfer)
        return 0

    cdef bint back_off(self, WaitState *state) noexcept nogil:
        """Let a moment pass after a test that failed; return whether it is time for `check_and_poll`."""
        cdef double now = monotonic()
        cdef int found = 0
        if state.began == 0:
            state.began = now
            state.next_poll = now + min(POLL_INTERVAL, self.timeout)
            state.next_ping = PING_INTERVAL
            state.sleep = MIN_SLEEP
        if not give_way(now - state.began, self.spin, &state.sleep):
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
        PyObject_GetBuffer(message, &transfer.buffer, PyBUF_SIMPLE)
        transfer.endpoint = self
        self.send_pieces(transfer, to, CONTROL, transfer.buffer.len + 1, HOST)  # always in one piece

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
                    self.start_receive(bytearray(nbytes), &message, status.MPI_SOURCE)

    def reap(self):
        """Release transfers that earlier calls left and that are complete by now; return how many are not.

        Never called during a wait: it would take from it the transfer that is waited for, and its error.
        """
        cdef Transfer transfer
        cdef bint done
        remaining = []
        for transfer in self.pending:
            transfer.test(&done)
            if not done:
                remaining.append(transfer)
        self.pending = remaining
        return len(remaining)

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
        self.pending = []
        self.comm = MPI_COMM_NULL
