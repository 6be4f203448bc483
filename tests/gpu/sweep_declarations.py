"""The driver's entry points and their arguments, for sweep.py: read from the table in api/ and from declarations.

Declarations are what signatures/ compares with too: cudarc's, from NVIDIA's header, and signatures/src/driver.rs. Where
the CUDA toolkit is installed, its headers are read before cudarc, those of graphics interop beside cuda.h included.
"""
import collections
import fnmatch
import glob
import os
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "api" / "src" / "table" / "rows.rs"
DECLARED = ROOT / "signatures" / "src" / "driver.rs"
HEADERS = ("cuda.h", "cudaProfiler.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")

# What is not called, and why. The rest without a declaration is not called either, and listed in the record.
EXCLUDED = {
    "cudbg*": "the debugger's interface: no CUresult, and cudbgMain waits for a debugger",
    "cuEGLApiInit": "no header declares it",
    "cuMemGetAttribute": "no header declares it",
    "cuMemGetAttribute_v2": "no header declares it",
    "cuCheckpointProcessLock": "would stop another process",
    "cuCheckpointProcessCheckpoint": "would stop another process",
    "cuCheckpointProcessRestore": "would change another process",
    "cuCheckpointProcessUnlock": "would change another process",
    "cuEGLStreamProducerPresentFrame": "takes a CUeglFrame by value",
}

# An argument. `kind` is pointer, callback, device, address, handle, enumeration, integer, float or struct; `type` is that
# of a handle or a struct, and `name` of a pointer to one; `value` is what an integer is in a call with valid arguments.
Argument = collections.namedtuple("Argument", "kind type value")

# Passed by value.
STRUCTS = ("CUipcMemHandle", "CUipcEventHandle", "CUmemLocation")
# Handles that are no pointers.
NUMBERS = ("CUtexObject", "CUsurfObject", "CUmemGenericAllocationHandle", "CUgraphConditionalHandle")
# Integers that count or measure something: 1 where 0 would leave a call nothing to do. All others, such as flags, are 0.
COUNTS = re.compile(r"count|num|len|size|bytes|width|height|depth|level|pitch|(grid|block)dim|^[nxyz]$", re.IGNORECASE)


def symbols_of(rows, all_versions=False):
    """The symbols that serve each entry point of the table for the legacy default stream: the newest, or all of them."""
    found = []
    for _, versions in re.findall(r"^\s+(cu\w+): \[[^\]]*\] \{(.*)\}\s*$", rows, re.MULTILINE):
        symbols = [version.split(":")[1].split("/")[0].strip() for version in versions.split(",")]
        found += dict.fromkeys(symbols if all_versions else symbols[-1:])
    return found


class Declarations:
    """Arguments by symbol, as (type, name) in a syntax without its own words, and what types are."""

    def __init__(self):
        self.functions = {}
        self.types = {}

    def add(self, other):
        """Adds what is not known yet."""
        self.functions = other.functions | self.functions
        self.types = other.types | self.types
        return self

    def arguments(self, symbol):
        return [self.argument(*argument) for argument in self.functions[symbol]]

    def argument(self, text, name):
        if text.startswith("*"):
            # Not paths: a call may write there.
            is_name = text == "*text" and name in ("name", "symbol")
            return Argument("pointer", "name" if is_name else None, None)
        seen = text
        while True:
            if seen in STRUCTS:
                return Argument("struct", seen, None)
            if seen in NUMBERS:
                return Argument("handle", seen, None)
            if seen == "CUdevice":
                return Argument("device", None, None)
            if seen == "CUdeviceptr":
                return Argument("address", None, None)
            known = self.types.get(seen)
            if known is None:
                break
            if known in ("handle", "callback", "enumeration"):
                return Argument(known, seen if known == "handle" else None, None)
            seen = known
        if seen in ("float", "double"):
            return Argument("float", seen, None)
        return Argument("integer", None, 1 if COUNTS.search(name) else 0)


def split(text):
    """Splits at commas that are in no brackets."""
    parts, depth, part = [], 0, ""
    for character in text.replace("->", "  "):
        depth += (character in "(<[") - (character in ")>]")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [part.strip() for part in [*parts, part] if part.strip()]


def rust_type(text):
    text = text.strip().replace("::core::ffi::", "").replace("c_float", "float").replace("f32", "float")
    if text == "*const c_char":
        return "*text"
    return "*" if text.startswith(("*", "::core::option")) else text


def parse_cudarc(text):
    """cudarc's src/driver/sys/mod.rs. The first of several versions of a function counts: they are called alike."""
    found = Declarations()
    for symbol, arguments in re.findall(r"^pub unsafe fn (cu\w+)\((.*?)\) -> CUresult", text, re.MULTILINE):
        pairs = [argument.split(":", 1) for argument in split(arguments)]
        found.functions.setdefault(symbol, [(rust_type(kind), name.strip()) for name, kind in pairs])
    for name, kind in re.findall(r"^pub type (\w+) = (.*);$", text, re.MULTILINE):
        found.types[name] = ("callback" if kind.startswith("::core::option") else "handle" if kind.startswith("*")
                             else rust_type(kind))
    for name in re.findall(r"^pub (?:enum|struct) (\w+_enum)\b", text, re.MULTILINE):
        found.types[name] = "enumeration"
    for name, alias in re.findall(r"^pub use self::(\w+) as (\w+);$", text, re.MULTILINE):
        found.types[alias] = name
    return found


def parse_declared(text):
    """What signatures/src/driver.rs declares with types, which have no names there."""
    found = Declarations()
    block = re.search(r"^declared! \{(.*?)^\}", text, re.MULTILINE | re.DOTALL)[1]
    block = re.sub(r"//.*", "", block)
    for symbol, arguments in re.findall(r"(cu\w+)\(([^)]*)\)", block):
        found.functions[symbol] = [(rust_type(kind), "") for kind in split(arguments)]
    return found


def parse_header(text):
    """A C header of the toolkit. A macro gives the newest version of a function its symbol."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    newest = dict(re.findall(r"^\s*#\s*define\s+(cu\w+)\s+(?:__CUDA_API_PT[DS]+Z?\()?(cu\w+)", text, re.MULTILINE))
    found = Declarations()
    for symbol, arguments in re.findall(r"\bCUresult\s+CUDAAPI\s+(cu\w+)\s*\(([^;]*)\)\s*;", text):
        # The old versions follow with their own names, after the macros were taken back.
        found.functions.setdefault(newest.get(symbol, symbol), [c_argument(each) for each in split(arguments)
                                                                if each != "void"])
    for name in re.findall(r"typedef\s+struct\s+\w+\s*\*\s*(\w+)\s*;", text):
        found.types[name] = "handle"
    for name in re.findall(r"typedef\s+[\w\s*]+\((?:\s*CUDA_CB)?\s*\*\s*(\w+)\s*\)\s*\(", text):
        found.types[name] = "callback"
    for name in re.findall(r"\btypedef\s+enum\b[^{;]*\{[^}]*\}\s*(\w+)\s*;", text):
        found.types[name] = "enumeration"
    for kind, name in re.findall(r"typedef\s+(\w+)\s+(\w+)\s*;", text):
        found.types.setdefault(name, kind)
    return found


def c_argument(text):
    kind, name = re.fullmatch(r"(.*?)(\w*)(?:\[\w*\])?", text.strip(), re.DOTALL).groups()
    if re.fullmatch(r"const\s+char\s*\*", kind.strip()):
        return "*text", name
    if "*" in text or "[" in text:
        return "*", name
    words = [word for word in kind.split() if word not in ("const", "struct", "enum")]
    return (" ".join(words), name) if words else (name, "")


def sources():
    """Files with declarations that are here, in the order in which they count."""
    compiler = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda",
             compiler and os.path.dirname(os.path.dirname(os.path.realpath(compiler)))]
    homes = [home for home in homes if home and os.path.exists(os.path.join(home, "include", HEADERS[0]))]
    headers = [os.path.join(home, "include", name) for home in homes[:1] for name in HEADERS]
    cargo = os.environ.get("CARGO_HOME", os.path.expanduser("~/.cargo"))
    cudarc = sorted(glob.glob(os.path.join(cargo, "registry/src/*/cudarc-*/src/driver/sys/mod.rs")))[-1:]
    return [path for path in headers if os.path.exists(path)] + cudarc


def read(files):
    """All declarations in these files and the project's own."""
    found = Declarations()
    for file in files:
        text = pathlib.Path(file).read_text()
        found.add(parse_cudarc(text) if str(file).endswith(".rs") else parse_header(text))
    return found.add(parse_declared(DECLARED.read_text()))


def entry_points(files, all_versions=False):
    """({symbol: its arguments}, {symbol: why it is not called}) for the whole table."""
    declarations = read(files)
    called, left_out = {}, {}
    for symbol in symbols_of(TABLE.read_text(), all_versions):
        reason = next((why for name, why in EXCLUDED.items() if fnmatch.fnmatchcase(symbol, name)), None)
        if reason is None and symbol not in declarations.functions:
            reason = "no declaration in the files that were read"
        if reason:
            left_out[symbol] = reason
        else:
            called[symbol] = declarations.arguments(symbol)
    return called, left_out
