# cython: language_level=3, boundscheck=False, wraparound=False
"""The connections of `connections.hpp`, for Python: without the GIL while they wait or write."""

from hashlib import shake_128

cimport cython
cimport numpy as np
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string

np.import_array()

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef extern from "connections.hpp" namespace "sparsecomm" nogil:
    enum: DATA_ "sparsecomm::DATA"
    enum: GOODBYE_ "sparsecomm::GOODBYE"
    enum: SENT_ "sparsecomm::SENT"
    enum: DISCONNECTED_ "sparsecomm::DISCONNECTED"
    enum: UNREADABLE_ "sparsecomm::UNREADABLE"
    const size_t TICKETS_BYTES_ "sparsecomm::TICKETS_BYTES"

    cdef cppclass CMessage "sparsecomm::Message":
        int64_t number
        char *memory
        uint64_t total

    cdef cppclass CCompletion "sparsecomm::Completion":
        int kind
        int rank
        CMessage message
        uint64_t request
        string text

    cdef cppclass CTraffic "sparsecomm::Traffic":
        uint64_t sent
        uint64_t received
        double seconds
        double round_trip
        uint64_t retransmits
        int connections

    enum CSent "sparsecomm::Sent":
        DONE "sparsecomm::Sent::DONE"
        UNDER_WAY "sparsecomm::Sent::UNDER_WAY"
        BROKEN "sparsecomm::Sent::BROKEN"

    cdef cppclass CConnections "sparsecomm::Connections":
        CConnections(int rank, int size, size_t limit, int streams) except +
        int listen(const string &address) except +
        void set_peer(int rank, const string &address, int port, const string &tickets) except +
        void start(double seconds) except +
        cpp_bool join(double seconds)
        string failure(int rank)
        cpp_bool is_connected(int rank)
        CSent send(int to, int32_t kind, int64_t number, const char *data, size_t nbytes, uint64_t request) except +
        cpp_bool next(double seconds, CCompletion *to)
        size_t pending()
        CTraffic traffic(int rank)
        int thread_id()
        void close(double seconds)

DATA, GOODBYE, SENT, DISCONNECTED, UNREADABLE = DATA_, GOODBYE_, SENT_, DISCONNECTED_, UNREADABLE_
TOKEN_BYTES = 16


@cython.final
@cython.freelist(16)
@cython.no_gc
cdef class Received:
    """Memory of a message that has come, kept by the array that is made of it."""

    cdef char *memory

    def __dealloc__(self):
        free(self.memory)


cdef check_token(bytes token):
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes; expected {TOKEN_BYTES}")


cdef class Connections:
    """The connections of a rank to all others; see `connections.hpp`.

    A completion is a tuple: the kind of a message, or what else it tells; the rank of the peer; the number of the
    message's call; and the message's data, the request of the message that is out, or in words how the connection has
    broken, or what has come that is no message.
    """

    cdef CConnections *own
    cdef int rank, process
    cdef bytes token
    cdef uint64_t last_request
    cdef dict lent  # number of a request -> the data of a message under way, and its request

    def __cinit__(self, int rank, int size, size_t limit, int streams):
        self.rank, self.process = rank, getpid()
        self.token = b""
        self.lent = {}
        self.own = new CConnections(rank, size, limit, streams)

    def __dealloc__(self):
        if self.own != NULL and self.process == getpid():
            with nogil:
                del self.own

    def listen(self, str address, bytes token):
        """Listen on an address of this machine, and start the thread; return the port.

        Args:
            token: `TOKEN_BYTES` random bytes, new in every rendezvous, that only the ranks of the group know.
        """
        check_token(token)
        self.token = token
        return self.own.listen(address.encode())

    def set_peer(self, int rank, str address, int port, bytes token):
        """Set the address at which ``rank`` listens, and its token. Call `listen` first."""
        check_token(token)
        check_token(self.token)
        both = self.token + token if self.rank < rank else token + self.token
        self.own.set_peer(rank, address.encode(), port, shake_128(both).digest(TICKETS_BYTES_))

    def start(self, double seconds):
        """Connect the ranks. A host that is silent for so many seconds is dead."""
        self.own.start(seconds)

    def join(self, double seconds):
        """Wait until all ranks are connected, or one cannot be, for so many seconds; return whether all are."""
        cdef cpp_bool all_joined
        with nogil:
            all_joined = self.own.join(seconds)
        return all_joined

    def is_connected(self, int rank):
        """Return whether there has been a connection to a rank."""
        return self.own.is_connected(rank)

    def failure(self, int rank):
        """Return why there is no connection to a rank; empty: there is one, or nothing is known."""
        return self.own.failure(rank).decode(errors="replace")

    @property
    def thread_id(self):
        """The system's number of the thread."""
        return self.own.thread_id()

    def send(self, int to, int64_t number, np.ndarray data, request):
        """Start sending the data of call ``number``: contiguous bytes.

        Returns:
            Whether they may be reused. Otherwise the completion `SENT` says when ``request`` is out. None: the
            connection has broken, and the completion `DISCONNECTED` or `UNREADABLE` says how, soon.
        """
        cdef CSent sent
        cdef char *memory = np.PyArray_BYTES(data)
        cdef size_t nbytes = np.PyArray_NBYTES(data)
        cdef uint64_t this = self.last_request + 1
        self.last_request = this
        self.lent[this] = data, request
        sent = BROKEN
        try:
            with nogil:
                sent = self.own.send(to, DATA_, number, memory, nbytes, this)
        finally:
            if sent != UNDER_WAY:
                del self.lent[this]
        if sent == UNDER_WAY:
            return False
        return True if sent == DONE else None

    def send_control(self, int to, int kind, int64_t number, bytes text):
        """Send a control message, unless the peer is gone."""
        cdef const char *memory = text
        cdef size_t nbytes = len(text)
        with nogil:
            self.own.send(to, kind, number, memory, nbytes, 0)

    def next(self, double seconds):
        """Return the next completion, or None if there is none within so many seconds, or a signal has come."""
        cdef CCompletion completion
        cdef cpp_bool found
        cdef Received keeper
        cdef np.npy_intp nbytes
        if seconds > 0:
            with nogil:
                found = self.own.next(seconds, &completion)
        else:
            found = self.own.next(0.0, &completion)
        if not found:
            return None
        if completion.kind == SENT_:
            return SENT_, completion.rank, 0, self.lent.pop(completion.request)[1]
        if completion.kind == DISCONNECTED_ or completion.kind == UNREADABLE_:
            return completion.kind, completion.rank, 0, completion.text.decode(errors="replace")
        keeper = Received.__new__(Received)
        keeper.memory = completion.message.memory
        nbytes = completion.message.total
        data = np.PyArray_SimpleNewFromData(1, &nbytes, np.NPY_UINT8, keeper.memory)
        np.set_array_base(data, keeper)
        return completion.kind, completion.rank, completion.message.number, data

    @property
    def pending(self):
        """How many completions there are now."""
        return self.own.pending()

    def traffic(self, int rank):
        """Return the traffic with a rank.

        Bytes sent and received, the seconds for which some were under way to it, the round trip in seconds, segments
        sent again, and connections.
        """
        cdef CTraffic found = self.own.traffic(rank)
        return found.sent, found.received, found.seconds, found.round_trip, found.retransmits, found.connections

    def close(self, double seconds):
        """Say goodbye, and end the thread; wait until peers have all, or take nothing for so many seconds."""
        with nogil:
            self.own.close(seconds)
        self.lent.clear()
