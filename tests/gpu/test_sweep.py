"""Tests of sweep.py that need no GPU."""
import contextlib
import ctypes
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import sweep
import sweep_calls
import sweep_declarations
from sweep import Key
from sweep_declarations import Argument

CUDARC = """
pub use self::CUlimit_enum as CUlimit;
pub use self::CUmemFlags_enum as CUmemFlags;
pub type CUcontext = *mut CUctx_st;
pub type CUdevice = CUdevice_v1;
pub type CUdevice_v1 = ::core::ffi::c_int;
pub type CUhostFn = ::core::option::Option<unsafe extern "C" fn(userData: *mut ::core::ffi::c_void)>;
pub type CUipcMemHandle = CUipcMemHandle_v1;
pub type CUstream = *mut CUstream_st;
pub enum CUlimit_enum {
}
pub struct CUmemFlags_enum(pub ::core::ffi::c_uint);
#[cfg(any(feature = "cuda-12090"))]
pub unsafe fn cuCtxSetLimit(limit: CUlimit, value: usize) -> CUresult {
}
#[cfg(any(feature = "cuda-13000"))]
pub unsafe fn cuCtxSetLimit(limit: CUlimit, value: usize) -> CUresult {
}
pub unsafe fn cuLaunchHostFunc(hStream: CUstream, fn_: CUhostFn, userData: *mut ::core::ffi::c_void) -> CUresult {
}
pub unsafe fn cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, Flags: ::core::ffi::c_uint) -> CUresult {
}
pub unsafe fn cuParamSetf(hfunc: CUfunction, offset: ::core::ffi::c_int, value: f32) -> CUresult {
}
pub unsafe fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const ::core::ffi::c_char) -> CUresult {
}
pub unsafe fn cuMemFlag(flags: CUmemFlags, numOps: ::core::ffi::c_uint) -> CUresult {
}
"""

HEADER = """
#define cuMemAlloc cuMemAlloc_v2
#define cuMemsetD8 __CUDA_API_PTDS(cuMemsetD8_v2)
typedef unsigned long long CUdeviceptr_v2; /* an address; */
typedef CUdeviceptr_v2 CUdeviceptr;
typedef struct CUarray_st *CUarray;
typedef void (CUDA_CB *CUhostFn)(void *userData);
typedef void (*CUasyncCallback)(CUasyncNotificationInfo* info, void* userData);
typedef enum CUlimit_enum {
    CU_LIMIT_STACK_SIZE = 0x00, // bytes
} CUlimit;
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N);
CUresult CUDAAPI cuProfilerStop(void);
CUresult CUDAAPI cuNamed(char *name, const char* symbol, const char *path);
CUresult CUDAAPI cuThing(CUarray array, const unsigned int sizes[], CUlimit limit, CUhostFn fn, CUasyncCallback callback,
                         unsigned int flags);
#undef cuMemAlloc
CUresult CUDAAPI cuMemAlloc(unsigned int *dptr, unsigned int bytesize);
CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize);
"""

# A driver: NULL is refused with 1; a handle is followed, whatever it is, so that a wrong one ends the process.
DRIVER = """
#include <stdlib.h>
#include <unistd.h>
static int ready, context;
int cuInit(unsigned flags) { if (getenv("SWEEP_TEST_ABORTS")) abort(); ready = 1; return flags; }
int cuCtxGetCurrent(void **c) { *c = context ? &context : 0; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 8; *a = context; return d; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return d; }
int cuDevicePrimaryCtxReset_v2(int d) { context = 0; return d; }
int cuCtxSetCurrent(void *c) { context = c != 0; return 0; }
int cuCtxCreate_v2(void **c, unsigned f, int d) { *c = &context; context = 1; return d; }
int cuCtxDestroy_v2(void *c) { context = 0; return 0; }
int cuCtxSynchronize(void) { return context == 2 ? 700 : 0; }
int cuEventCreate(int **e, unsigned flags) {
    if (!e) return 1;
    if (!ready) return 3;
    if (!context) return 201;
    *e = malloc(4); **e = 5; return 0;
}
int cuEventQuery(int *e) { return e ? *e == 5 ? 0 : 400 : 400; }
int cuEventRecord(int *e, void *s) { if (context) context = 2; return context ? 0 : 201; }
int cuStreamQuery(void *s) { if (!s) for (;;) pause(); return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { return context ? 0 : 201; }
"""


def keys(codes):
    return {Key(*name.split()): code for name, code in codes.items()}


class Declarations(unittest.TestCase):
    def test_table(self):
        rows = """
            cuEventRecord: [Async idle] { 2000: cuEventRecord / -, 7000: cuEventRecord / cuEventRecord_ptsz }
            cuMemAlloc: [Request idle] { 2000: cuMemAlloc, 3020: cuMemAlloc_v2 }
        """
        self.assertEqual(sweep_declarations.symbols_of(rows), ["cuEventRecord", "cuMemAlloc_v2"])
        every = sweep_declarations.symbols_of(rows, all_versions=True)
        self.assertEqual(every, ["cuEventRecord", "cuMemAlloc", "cuMemAlloc_v2"])

    def test_cudarc(self):
        found = sweep_declarations.parse_cudarc(CUDARC)
        self.assertEqual(found.arguments("cuCtxSetLimit"),
                         [Argument("enumeration", None, None), Argument("integer", None, 0)])
        self.assertEqual(found.arguments("cuLaunchHostFunc"),
                         [Argument("handle", "CUstream", None), Argument("callback", None, None),
                          Argument("pointer", None, None)])
        self.assertEqual(found.arguments("cuIpcOpenMemHandle_v2"),
                         [Argument("pointer", None, None), Argument("struct", "CUipcMemHandle", None),
                          Argument("integer", None, 0)])
        self.assertEqual(found.arguments("cuParamSetf")[2].kind, "float")
        self.assertEqual(found.arguments("cuModuleGetFunction")[2], Argument("pointer", "name", None))
        self.assertEqual(found.arguments("cuMemFlag"), [Argument("enumeration", None, None), Argument("integer", None, 1)])

    def test_header(self):
        found = sweep_declarations.parse_header(HEADER)
        self.assertEqual(found.arguments("cuMemAlloc_v2"), [Argument("pointer", None, None), Argument("integer", None, 1)])
        self.assertEqual([argument.kind for argument in found.arguments("cuMemsetD8_v2")],
                         ["address", "integer", "integer"])
        self.assertEqual(found.arguments("cuProfilerStop"), [])
        self.assertEqual([argument.type for argument in found.arguments("cuNamed")], [None, "name", None])
        self.assertEqual([argument.kind for argument in found.arguments("cuThing")],
                         ["handle", "pointer", "enumeration", "callback", "callback", "integer"])

    def test_the_project_s_own(self):
        """The table and the declarations that are in the project are read whole."""
        table = sweep_declarations.TABLE.read_text()
        symbols = sweep_declarations.symbols_of(table)
        rows = [line for line in table.splitlines() if line.startswith("            cu")]
        self.assertEqual(len(symbols), len(rows))
        self.assertIn("cuEventDestroy_v2", symbols)
        found = sweep_declarations.read([])
        self.assertEqual([argument.kind for argument in found.arguments("cuMemGetMemPool")][:2], ["pointer", "pointer"])
        self.assertEqual(found.arguments("cuStreamWaitValue32")[1].kind, "address")

    def test_excluded_symbols_are_in_the_table(self):
        symbols = sweep_declarations.symbols_of(sweep_declarations.TABLE.read_text())
        for pattern in sweep_declarations.EXCLUDED:
            self.assertTrue(sweep_declarations.fnmatch.filter(symbols, pattern), pattern)

    @unittest.skipUnless(sweep_declarations.sources(), "neither a CUDA toolkit nor cudarc's source is here")
    def test_what_is_served_is_called(self):
        called, left_out = sweep_declarations.entry_points(sweep_declarations.sources())
        served = {symbol for symbol in left_out if sweep_declarations.DECLARED.read_text().find(f"{symbol}(") >= 0}
        self.assertEqual(served, set())
        self.assertGreater(len(called), 400)


class Cases(unittest.TestCase):
    def test_names(self):
        arguments = [Argument("pointer", None, None), Argument("handle", "CUevent", None), Argument("device", None, None)]
        self.assertEqual(sweep_calls.cases(arguments, "primary"),
                         ["valid", "null:1", "zero:2", "odd:2", "zeroed:2", "odd:3", "zero:all", "odd:all", "nothing"])
        self.assertEqual(sweep_calls.cases(arguments, "reset"), ["valid", "null:1", "zero:2", "nothing"])
        self.assertEqual(sweep_calls.cases([], "primary"), ["valid"])

    def test_values(self):
        arguments = [Argument("pointer", None, None), Argument("handle", "CUevent", None), Argument("callback", None, None),
                     Argument("integer", None, 1), Argument("enumeration", None, None), Argument("address", None, None)]
        objects = sweep_calls.Objects(None)
        objects.made = {"CUevent": 77, "CUdeviceptr": 88}
        page, callback = sweep_calls.PAGE, sweep_calls.CALLBACK.value

        def values(case):
            return [value.value for value in sweep_calls.values(arguments, case, objects, page)]

        self.assertEqual(values("valid"), [page, 77, callback, 1, 1, 88])
        self.assertEqual(values("null:1"), [0, 77, callback, 1, 1, 88])
        self.assertEqual(values("null:all"), [0, 77, 0, 1, 1, 88])
        self.assertEqual(values("odd:6"), [page, 77, callback, 1, 1, sweep_calls.ODD])
        self.assertEqual(values("zeroed:2"), [page, 2 * page, callback, 1, 1, 88])
        self.assertEqual(values("zero:all"), [page, 0, callback, 1, 1, 0])
        self.assertEqual(values("nothing"), [0, 0, 0, 1, 1, 0])

    def test_structs_are_as_large_as_the_driver_s(self):
        sizes = {name: ctypes.sizeof(kind) for name, kind in sweep_calls.STRUCTS.items()}
        self.assertEqual(sizes, {"CUmemLocation": 8, "CUipcMemHandle": 64, "CUipcEventHandle": 64})
        self.assertEqual(set(sizes), set(sweep_declarations.STRUCTS))

    def test_units(self):
        event, none = [Argument("handle", "CUevent", None)], []
        called = {"cuA": event, "cuB": none, "cuC": event}
        given = sweep.keys_of(called, ["primary"])
        units = sweep.units_of(given, called, 100)
        self.assertEqual([[key.symbol for key in unit] for unit in units], [["cuA"] * 4 + ["cuC"] * 4, ["cuB"]])
        self.assertEqual(sorted(sum(sweep.units_of(given, called, 1), [])), sorted(given))


@unittest.skipUnless(shutil.which("cc"), "no C compiler")
class Calls(unittest.TestCase):
    """Workers with a driver that is written here."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        source = pathlib.Path(cls.folder.name, "driver.c")
        source.write_text(DRIVER)
        cls.library = str(source.with_suffix(".so"))
        subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", cls.library, str(source)], check=True)

    def record(self, called, situations, size=sweep.UNIT):
        units = sweep.units_of(sweep.keys_of(called, situations), called, size)
        return sweep.Recorder(self.library, os.environ.copy(), 2).record(units, called)

    def test_situations(self):
        called = {"cuEventCreate": [Argument("pointer", None, None), Argument("integer", None, 0)]}
        found = self.record(called, sweep_calls.SITUATIONS)
        codes = {situation: found[Key(situation, "cuEventCreate", "valid")] for situation in sweep_calls.SITUATIONS}
        self.assertEqual(codes, {"uninitialized": "3", "initialized": "201", "primary": "0", "destroyed": "201",
                                 "reset": "201", "atexit": "0", "destructor": "0"})
        self.assertEqual({found[Key(situation, "cuEventCreate", "null:1")] for situation in codes}, {"1"})
        self.assertEqual(found[Key("primary", "context", "active")], "0:1")
        self.assertEqual(found[Key("reset", "context", "active")], "0:0")
        self.assertEqual(found[Key("reset", "context", "flags")], "0:8")
        self.assertNotIn(Key("uninitialized", "context", "active"), found)

    def test_a_signal_is_one_call_s(self):
        called = {"cuEventQuery": [Argument("handle", "CUevent", None)]}
        for size in (1, sweep.UNIT):
            found = self.record(called, ["primary"], size)
            codes = {key.case: code for key, code in found.items() if key.symbol == "cuEventQuery"}
            self.assertEqual(codes, {"valid": "0", "zero:1": "400", "odd:1": "signal:11", "zeroed:1": "400"})
            self.assertEqual(found[Key("primary", "CUevent", "made")], "0")

    def test_an_error_that_comes_later(self):
        called = {"cuEventRecord": [Argument("handle", "CUevent", None), Argument("handle", "CUstream", None)]}
        found = self.record(called, ["primary", "initialized"])
        self.assertEqual(found[Key("primary", "cuEventRecord", "valid")], "0/700")
        self.assertEqual(found[Key("primary", "CUstream", "made")], "missing")
        self.assertEqual(found[Key("initialized", "cuEventRecord", "valid")], "201")

    def test_a_hang(self):
        called = {"cuStreamQuery": [Argument("handle", "CUstream", None)]}
        patience, sweep_calls.PATIENCE = sweep_calls.PATIENCE, 0.2
        try:
            driver = ctypes.CDLL(self.library)
            calls = [("cuStreamQuery", called["cuStreamQuery"], case) for case in ("valid", "odd:1")]
            self.assertEqual(sweep_calls.drive(driver, "initialized", calls)[0], ["hang"])
            self.assertEqual(sweep_calls.drive(driver, "initialized", calls[1:])[0], ["0"])
        finally:
            sweep_calls.PATIENCE = patience

    def test_a_situation_that_cannot_be_made(self):
        os.environ["SWEEP_TEST_ABORTS"] = "1"
        self.addCleanup(os.environ.pop, "SWEEP_TEST_ABORTS")
        called = {"cuMemGetInfo_v2": [Argument("pointer", None, None), Argument("pointer", None, None)]}
        codes = set(self.record(called, ["initialized"]).values())
        self.assertEqual(codes, {"setup:signal:6"})

    def test_a_fault_of_the_sweep_is_one_call_s(self):
        called = {"cuMemGetInfo_v2": [Argument("struct", "Unknown", None)], "cuNothing": []}
        codes = self.record(called, ["uninitialized"])
        self.assertEqual(codes, keys({"uninitialized cuMemGetInfo_v2 valid": "failed:KeyError:'Unknown'",
                                      "uninitialized cuNothing valid": "missing"}))

    def test_a_missing_symbol(self):
        found = self.record({"cuNothing": []}, ["uninitialized"])
        self.assertEqual(found, keys({"uninitialized cuNothing valid": "missing"}))


class Comparing(unittest.TestCase):
    def test_codes(self):
        good = [("0", "0"), ("1", "1"), ("0/700", "0/700"), ("signal:11", "400"), ("hang", "1"), ("missing", "801"),
                ("missing", "missing"), ("0:1", "0:1")]
        bad = [("1", "0"), ("0", "0/700"), ("1", "400"), ("signal:11", "0"), ("signal:11", "signal:11"), ("hang", "hang"),
               ("signal:11", "hang"), ("missing", "0"), ("1", "signal:11"), ("signal:11", "0/1"), ("1", "missing"),
               ("0:1", "0:0"), ("signal:11", "absent")]
        for native, ours in good:
            self.assertTrue(sweep.as_good(native, ours), (native, ours))
        for native, ours in bad:
            self.assertFalse(sweep.as_good(native, ours), (native, ours))

    def test_listed(self):
        known = sweep.read_differences("# comment\n\nreset cuA* null:* 1 400 a reason\n* cuB valid [0-9]* 801 not served\n"
                                       "primary cuC valid 1 0 mended\nprimary cuD valid 1 0 not called\n")
        native = keys({"reset cuA null:1": "1", "reset cuA null:2": "1", "primary cuA null:1": "1", "primary cuB valid": "0",
                       "primary cuC valid": "1"})
        ours = keys({"reset cuA null:1": "400", "reset cuA null:2": "0", "primary cuA null:1": "400",
                     "primary cuB valid": "801", "primary cuC valid": "1"})
        differing, stale = sweep.compare(native, ours, known)
        self.assertEqual(differing, [Key("primary", "cuA", "null:1"), Key("reset", "cuA", "null:2")])
        self.assertEqual([(entry.symbol, entry.line) for entry in stale], [("cuC", 5)])

    def test_a_call_that_one_record_lacks(self):
        self.assertEqual(sweep.compare(keys({"a b c": "1"}), {}, [])[0], [Key("a", "b", "c")])
        self.assertEqual(sweep.compare({}, keys({"a b c": "0"}), [])[0], [Key("a", "b", "c")])

    def test_a_difference_needs_a_reason(self):
        with self.assertRaisesRegex(ValueError, "line 2"):
            sweep.read_differences("#\nreset cuA valid 1 400\n")

    def test_the_list_is_in_order(self):
        sweep.read_differences(sweep.DIFFERENCES.read_text())

    def test_records(self):
        results = keys({"reset cuB valid": "setup:cuInit=100", "primary cuA valid": "0", "primary cuA null:1": "signal:11"})
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "record")
            sweep.write(path, results, ["not called: cuC: a reason"])
            self.assertEqual(pathlib.Path(path).read_text(),
                             "# not called: cuC: a reason\nprimary cuA null:1=signal:11 valid=0\n"
                             "reset cuB valid=setup:cuInit=100\n")
            self.assertEqual(sweep.read(path), results)

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            native, ours = os.path.join(folder, "native"), os.path.join(folder, "ours")
            listed = pathlib.Path(folder, "listed")
            sweep.write(native, keys({"primary cuA valid": "1"}), [])
            sweep.write(ours, keys({"primary cuA valid": "400"}), [])
            for text, status in (("", 1), ("* cuA * 1 400 a reason\n", 0)):
                listed.write_text(text)
                sys.argv = ["sweep.py", "compare", native, ours, "--differences", str(listed)]
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    self.assertEqual(sweep.main(), status)
                self.assertEqual("cuA: native 1, ours 400: primary valid" in out.getvalue(), bool(status))


if __name__ == "__main__":
    unittest.main()
