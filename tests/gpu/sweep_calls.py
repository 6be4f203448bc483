"""The calls of sweep.py: in which situation, with which arguments; each in a process of its own.

A worker loads the driver, calls nothing in it, and forks a child for what it reads on its standard input.
"""
import ctypes
import json
import mmap
import os
import resource
import select
import signal
import sys
import time

# What a call may take, and what may come before it, seconds.
PATIENCE, SETUP_PATIENCE = 10, 40
ODD = 0x1234
PAGE = mmap.PAGESIZE

SUCCESS = 0
# In the place of a code: the driver does not export the symbol.
MISSING = "missing"
# Errors about arguments, the state of the driver or of the process: a call that gives one of them has changed nothing,
# and another may follow in the same process.
HARMLESS = {1, 3, 4, 101, 201, 400, 500, 709, 801}

# Before cuInit; after it; with the primary context current, and objects in it; after cuCtxDestroy of a current context
# and cuDevicePrimaryCtxReset, with what is left of their objects; in an exit handler that was registered after all that
# (it runs first), and in one that was registered before the driver was loaded, as destructors of a program's own
# statics are.
SITUATIONS = ("uninitialized", "initialized", "primary", "destroyed", "reset", "atexit", "destructor")
# Where wrong handles are tried: elsewhere a context's absence comes before anything about a handle.
ALL_CASES = ("uninitialized", "initialized", "primary")
# Where work that a call has started can be waited for.
CURRENT = ("primary", "atexit")


def cases(arguments, situation):
    """The names of an entry point's cases. A number is an argument's, from 1."""
    pointers = [i for i, argument in enumerate(arguments, 1) if argument[0] in ("pointer", "callback")]
    handles = [i for i, argument in enumerate(arguments, 1) if argument[0] in ("handle", "address", "device")]
    names = ["valid"] + [f"null:{i}" for i in pointers]
    if len(pointers) > 1:
        names.append("null:all")
    for i in handles:
        kind, of, _ = arguments[i - 1]
        # Device 0 is valid, and so is a handle that nothing makes here 0 already.
        if kind == "address" or of in MADE:
            names.append(f"zero:{i}")
        if situation in ALL_CASES:
            names.append(f"odd:{i}")
            names += [f"zeroed:{i}"] if kind != "device" else []
    if len(handles) > 1 and situation in ALL_CASES:
        names += ["zero:all", "odd:all"]
    if handles and pointers:
        names.append("nothing")
    return names


class MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


STRUCTS = {"CUmemLocation": MemLocation, "CUipcMemHandle": IpcHandle, "CUipcEventHandle": IpcHandle}

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b32 variable;
.visible .entry nothing()
{
    ret;
}
"""


class Refused(Exception):
    """A step before the call gave an error."""


class Objects:
    """What the situation's context has: one object of each type that the calls need."""

    def __init__(self, driver):
        self.driver = driver
        self.made = {}
        self.codes = {}

    def make(self, name):
        """The handle of one, or 0 where it cannot be made."""
        if name not in self.made:
            self.made[name] = 0
            try:
                self.made[name] = MADE[name](self)
                self.codes[name] = SUCCESS
            except Refused as refused:
                self.codes[name] = refused.args[1]
        return self.made[name]

    def call(self, symbol, *arguments):
        function = getattr(self.driver, symbol, None)
        code = function(*arguments) if function else MISSING
        if code != SUCCESS:
            raise Refused(symbol, code)

    def new(self, symbol, *arguments):
        """What a call gives that stores a handle where its first argument leads."""
        handle = ctypes.c_uint64()
        self.call(symbol, ctypes.byref(handle), *arguments)
        return handle.value

    def of(self, symbol, owner, *arguments):
        handle = self.make(owner)
        if not handle:
            raise Refused(symbol, self.codes[owner])
        return self.new(symbol, *(ctypes.c_uint64(handle) if argument is OWNER else argument for argument in arguments))


OWNER = object()
SIZE, FLAGS, DEVICE = ctypes.c_size_t, ctypes.c_uint(0), ctypes.c_int(0)


def current(objects):
    return objects.new("cuCtxGetCurrent")


def array(objects):
    # CUDA_ARRAY_DESCRIPTOR: width, height, format (32-bit floats), channels.
    descriptor = (ctypes.c_uint64 * 3)(8, 1, 0x20 | 1 << 32)
    return objects.new("cuArrayCreate_v2", descriptor)


def mipmapped_array(objects):
    # CUDA_ARRAY3D_DESCRIPTOR: width, height, depth, format, channels, flags.
    descriptor = (ctypes.c_uint64 * 5)(8, 8, 0, 0x20 | 1 << 32, 0)
    return objects.new("cuMipmappedArrayCreate", descriptor, ctypes.c_uint(1))


def allocation(objects):
    # CUmemAllocationProp: pinned, no shareable handle, on device 0; 2 MiB.
    properties = (ctypes.c_uint32 * 16)(1, 0, 1, 0)
    return objects.new("cuMemCreate", SIZE(2 << 20), properties, ctypes.c_uint64(0))


def resource_descriptor(objects):
    resources = (ctypes.c_char * PAGE)()
    objects.call("cuDeviceGetDevResource", DEVICE, resources, ctypes.c_int(1))
    return objects.new("cuDevResourceGenerateDesc", resources, ctypes.c_uint(1))


def library(objects):
    nothing = ctypes.c_void_p()
    return objects.new("cuLibraryLoadData", PTX, nothing, nothing, FLAGS, nothing, nothing, FLAGS)


def link(objects):
    state = ctypes.c_uint64()
    objects.call("cuLinkCreate_v2", FLAGS, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.byref(state))
    return state.value


MADE = {
    "CUcontext": current,
    "CUstream": lambda objects: objects.new("cuStreamCreate", FLAGS),
    "CUevent": lambda objects: objects.new("cuEventCreate", FLAGS),
    "CUdeviceptr": lambda objects: objects.new("cuMemAlloc_v2", SIZE(PAGE)),
    "CUgraph": lambda objects: objects.new("cuGraphCreate", FLAGS),
    "CUgraphNode": lambda objects: objects.of("cuGraphAddEmptyNode", "CUgraph", OWNER, ctypes.c_void_p(), SIZE(0)),
    "CUgraphExec": lambda objects: objects.of("cuGraphInstantiateWithFlags", "CUgraph", OWNER, ctypes.c_uint64(0)),
    "CUmemoryPool": lambda objects: objects.new("cuDeviceGetDefaultMemPool", DEVICE),
    "CUarray": array,
    "CUmipmappedArray": mipmapped_array,
    "CUtexref": lambda objects: objects.new("cuTexRefCreate"),
    "CUmemGenericAllocationHandle": allocation,
    "CUuserObject": lambda objects: objects.new("cuUserObjectCreate", ctypes.c_void_p(), CALLBACK, ctypes.c_uint(1),
                                                ctypes.c_uint(1)),
    "CUmodule": lambda objects: objects.new("cuModuleLoadData", PTX),
    "CUfunction": lambda objects: objects.of("cuModuleGetFunction", "CUmodule", OWNER, b"nothing"),
    "CUlibrary": library,
    "CUkernel": lambda objects: objects.of("cuLibraryGetKernel", "CUlibrary", OWNER, b"nothing"),
    "CUlinkState": link,
    "CUdevResourceDesc": resource_descriptor,
    "CUgreenCtx": lambda objects: objects.of("cuGreenCtxCreate", "CUdevResourceDesc", OWNER, DEVICE, ctypes.c_uint(1)),
}

LIBC = ctypes.CDLL(None, use_errno=True)
# A function that does nothing with whatever arguments, on any thread.
CALLBACK = ctypes.cast(LIBC.getpid, ctypes.c_void_p)


def type_of(argument):
    return "CUdeviceptr" if argument[0] == "address" else argument[1]


def values(arguments, case, objects, memory):
    """The C values of a case's arguments. `memory` has a page for each of them."""
    kind, _, which = case.partition(":")
    result = []
    for i, argument in enumerate(arguments):
        passed, of, value = argument
        chosen = which in ("all", str(i + 1))
        page = memory + i * PAGE
        # Every integer, pointer or handle takes a register, or eight bytes of the stack.
        if passed == "struct":
            result.append(STRUCTS[of]())
        elif passed == "float":
            result.append((ctypes.c_double if of == "double" else ctypes.c_float)(1))
        elif passed in ("integer", "enumeration"):
            # The first value of many enumerations stands for nothing.
            result.append(ctypes.c_uint64(1 if passed == "enumeration" else value))
        elif passed in ("pointer", "callback"):
            left_out = kind == "null" and chosen or kind == "nothing"
            given = CALLBACK.value if passed == "callback" else page
            result.append(ctypes.c_uint64(0 if left_out else given))
        elif kind == "odd" and chosen:
            result.append(ctypes.c_uint64(ODD))
        elif kind == "zeroed" and chosen:
            result.append(ctypes.c_uint64(page))
        elif kind == "zero" and chosen or kind == "nothing" or passed == "device":
            result.append(ctypes.c_uint64(0))
        else:
            result.append(ctypes.c_uint64(objects.made.get(type_of(argument), 0)))
    return result


def prepare(situation, driver, types):
    """Brings this process into a situation; what its context has."""
    objects = Objects(driver)
    if situation == "uninitialized":
        return objects
    objects.call("cuInit", FLAGS)
    if situation == "initialized":
        return objects
    if situation == "destroyed":
        context = objects.new("cuCtxCreate_v2", FLAGS, DEVICE)
    else:
        context = objects.new("cuDevicePrimaryCtxRetain", DEVICE)
        objects.call("cuCtxSetCurrent", ctypes.c_uint64(context))
    for name in types:
        objects.make(name)
    if situation == "destroyed":
        objects.call("cuCtxDestroy_v2", ctypes.c_uint64(context))
    elif situation == "reset":
        objects.call("cuDevicePrimaryCtxReset_v2", DEVICE)
    return objects


def state_of(driver):
    """What the driver says of contexts: whether one is current, and whether the primary one is active."""
    current_one, flags, active = ctypes.c_uint64(), ctypes.c_uint(), ctypes.c_int()
    code = driver.cuCtxGetCurrent(ctypes.byref(current_one))
    yield "current", code or f"0:{int(current_one.value != 0)}"
    code = driver.cuDevicePrimaryCtxGetState(DEVICE, ctypes.byref(flags), ctypes.byref(active))
    yield "active", code or f"0:{active.value}"
    yield "flags", code or f"0:{flags.value}"


class Child:
    """The process that calls; it writes lines into a pipe."""

    def __init__(self, driver, situation, calls, pipe):
        self.driver, self.situation, self.calls, self.pipe = driver, situation, calls, pipe
        self.objects = None

    def say(self, *words):
        os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())

    def run(self):
        types = sorted({type_of(argument) for _, arguments, _ in self.calls for argument in arguments} & MADE.keys())
        try:
            self.objects = prepare(self.situation, self.driver, types)
        except Refused as refused:
            self.say("refused", *refused.args)
            os._exit(0)
        for name, code in sorted(self.objects.codes.items()):
            self.say("fact", name, "made", code)
        for name, value in state_of(self.driver) if self.situation != "uninitialized" else ():
            self.say("fact", "context", name, value)
        self.say("ready")
        if self.situation == "atexit":
            register()
        elif self.situation != "destructor":
            self.make_calls()
            os._exit(0)
        LIBC.exit(0)

    def make_calls(self):
        memory = mmap.mmap(-1, 32 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for symbol, arguments, case in self.calls:
            memory[:] = bytes(len(memory))
            for i, (_, of, _) in enumerate(arguments):
                if of == "name":
                    name = b"variable" if "Global" in symbol else b"nothing"
                    memory[i * PAGE:i * PAGE + len(name)] = name
            function = getattr(self.driver, symbol, None)
            if function is None:
                self.say("code", MISSING)
                continue
            function.restype = ctypes.c_uint
            code = function(*values(arguments, case, self.objects, start))
            after = self.driver.cuCtxSynchronize() if code == SUCCESS and self.situation in CURRENT else SUCCESS
            self.say("code", f"{code}/{after}" if after != SUCCESS else code)
            if code not in HARMLESS and not changes_nothing(symbol, code):
                break
        self.say("end")


def changes_nothing(symbol, code):
    """Whether another call may follow a success in the same process."""
    return code == SUCCESS and any(word in symbol for word in ("Get", "Query", "CanAccess", "Enumerate", "Occupancy"))


# The child that this process is, for the exit handlers.
here = None


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def handler(_):
    if here is not None and here.calls:
        here.make_calls()
        here.calls = []


def register():
    LIBC.__cxa_atexit(handler, None, None)


def drive(driver, situation, calls):
    """Makes as many of the calls as one process can: (codes, [[name, what, value] of what was found on the way])."""
    global here
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nowhere, descriptor)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            here = Child(driver, situation, calls, writing)
            here.run()
        except BaseException as error:  # pylint: disable=broad-except
            os.write(writing, f"failed {type(error).__name__}:{'-'.join(str(error).split())}\n".encode())
        finally:
            os._exit(70)
    os.close(writing)
    codes, facts, state, hangs, failure = [], [], "setup", False, None
    for line in lines(reading, lambda: SETUP_PATIENCE if state == "setup" else PATIENCE):
        if line is None:
            hangs = True
            os.kill(pid, signal.SIGKILL)
            break
        word, *rest = line.split()
        if word == "fact":
            facts.append(rest)
        elif word == "refused":
            codes, state = [f"setup:{rest[0]}={rest[1]}"] * len(calls), "refused"
        elif word == "ready":
            state = "ready"
        elif word == "code":
            codes.append(rest[0])
        elif word == "end":
            state = "end"
        elif word == "failed":
            failure = f"failed:{rest[0]}"
    os.close(reading)
    ended = wait(pid)
    if hangs or failure:
        ended = failure or "hang"
    if state == "setup":
        codes = [f"setup:{ended}"] * len(calls)
    elif state == "ready" and len(codes) < len(calls):
        codes.append(ended)
    elif state == "end" and codes and ended != "exit:0":
        # The call went well and the rest of the exit did not.
        codes[-1] += f"/{ended}"
    return codes, facts


def lines(descriptor, patience):
    """Lines of a pipe, up to its end; None when the end of patience with its writer comes before that."""
    rest = b""
    while select.select([descriptor], [], [], patience())[0]:
        read = os.read(descriptor, 65536)
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        yield from (line.decode() for line in whole)
    yield None


def wait(pid):
    """How a child ended that has closed its pipe."""
    _, status = os.waitpid(pid, 0)
    return f"signal:{os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit:{os.WEXITSTATUS(status)}"


def work(library):
    """Reads a JSON line [situation, [[symbol, arguments, case], …]] and answers with one [codes, facts], again and again."""
    register()
    driver = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    for line in sys.stdin:
        situation, calls = json.loads(line)
        codes, facts = [], []
        while len(codes) < len(calls):
            more, found = drive(driver, situation, calls[len(codes):])
            codes += more
            facts += found
        print(json.dumps([codes, facts]), flush=True)
    os._exit(0)
