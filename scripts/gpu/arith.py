#!/usr/bin/env python3
"""Records what the arithmetic of a GPU gives, for softgpu to be compared with.

    arith.py ptx > tests/fixtures/arith.ptx
    arith.py run tests/fixtures/arith.ptx > tests/fixtures/arith.expected

`run` needs a CUDA driver: libcuda.so.1, or the library that MPSSHIM_CUDA_LIBRARY names. The inputs are
fixed, so two runs differ only where two drivers do. The output lists the inputs of each type once
("in TYPE a b c", hexadecimal words), then one line per kernel ("out NAME r0 r1 ...").
A kernel whose name ends in _approx may differ by 2 ulp, all others must agree in every bit.
"""
import ctypes
import os
import re
import struct
import sys

REGS = {"i32": "%r", "i64": "%rd", "f32": "%f", "f64": "%fd"}
BITS = {"i32": "b32", "i64": "b64", "f32": "f32", "f64": "f64"}
KERNELS = []


def op(name, kind, body, out):
    """A kernel over inputs a, b, c of `kind`; the result is in `out`, a register that {d} forms name."""
    KERNELS.append((name, kind, body, out))


def simple(instruction, kind, operands, out=None, approx=False):
    reg = REGS[kind]
    out = out or (reg + "9")
    sources = ", ".join(reg + str(i + 1) for i in range(operands))
    name = instruction.replace(".", "_") + ("_approx" if approx and not instruction.endswith("approx") else "")
    op(name, kind, f"{instruction} {out}, {sources};", out)


def kernels():
    for t, k in (("u32", "i32"), ("s32", "i32"), ("u64", "i64"), ("s64", "i64")):
        for i in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            simple(f"{i}.{t}", k, 2)
        simple(f"mad.lo.{t}", k, 3)
        reg, zero = REGS[k], "1"
        for i in ("div", "rem"):  # a zero divisor is undefined: or it with 1
            op(f"{i}_{t}", k, f"or.{BITS[k]} {reg}5, {reg}2, {zero}; {i}.{t} {reg}9, {reg}1, {reg}5;", reg + "9")
        narrow = "" if k == "i32" else "cvt.u32.u64 %r4, %rd2;"
        amount = "%r2" if k == "i32" else "%r4"
        op(f"shr_{t}", k, f"{narrow} shr.{t} {reg}9, {reg}1, {amount};", reg + "9")
        for c in ("eq", "ne", "lt", "le", "gt", "ge"):
            op(f"setp_{c}_{t}", k, f"setp.{c}.{t} %p1, {reg}1, {reg}2; selp.b32 %r9, 1, 0, %p1;", "%r9")
    for t in ("u32", "s32"):
        simple(f"mul.wide.{t}", "i32", 2, "%rd9")
        op(f"mad_wide_{t}", "i32", f"cvt.{t.replace('32', '64')}.{t} %rd3, %r3; mad.wide.{t} %rd9, %r1, %r2, %rd3;", "%rd9")
        simple(f"bfe.{t}", "i32", 3)
    for t, k in (("s32", "i32"), ("s64", "i64")):
        simple(f"abs.{t}", k, 1)
        simple(f"neg.{t}", k, 1)
    for t, k in (("b32", "i32"), ("b64", "i64")):
        for i in ("and", "or", "xor"):
            simple(f"{i}.{t}", k, 2)
        simple(f"not.{t}", k, 1)
        simple(f"brev.{t}", k, 1)
        simple(f"popc.{t}", k, 1, "%r9")
        simple(f"clz.{t}", k, 1, "%r9")
    op("shl_b32", "i32", "shl.b32 %r9, %r1, %r2;", "%r9")
    op("shl_b64", "i64", "cvt.u32.u64 %r4, %rd2; shl.b64 %rd9, %rd1, %r4;", "%rd9")
    op("bfi_b32", "i32", "and.b32 %r4, %r3, 31; bfi.b32 %r9, %r1, %r2, %r4, 7;", "%r9")
    op("bfi_b64", "i64", "cvt.u32.u64 %r4, %rd3; and.b32 %r4, %r4, 63; bfi.b64 %rd9, %rd1, %rd2, %r4, 13;", "%rd9")
    for mode in ("l.wrap", "l.clamp", "r.wrap", "r.clamp"):
        simple(f"shf.{mode}.b32", "i32", 3)
    simple("prmt.b32", "i32", 3)
    for lut in (0x96, 0xE8, 0xCA, 0x1B):
        op(f"lop3_{lut:02x}", "i32", f"lop3.b32 %r9, %r1, %r2, %r3, {lut};", "%r9")
    op("addc_u32", "i32", "add.cc.u32 %r4, %r1, %r2; addc.u32 %r9, %r3, 0;", "%r9")
    op("subc_u32", "i32", "sub.cc.u32 %r4, %r1, %r2; subc.u32 %r9, %r3, 0;", "%r9")
    op("madc_hi_u32", "i32", "mad.lo.cc.u32 %r4, %r1, %r2, %r3; madc.hi.u32 %r9, %r1, %r2, %r3;", "%r9")
    # Floating point.
    for t in ("f32", "f64"):
        for i, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2), ("sqrt", 1), ("rcp", 1)):
            simple(f"{i}.rn.{t}", t, n)
        for i in ("min", "max"):
            simple(f"{i}.{t}", t, 2)
        simple(f"abs.{t}", t, 1)
        simple(f"neg.{t}", t, 1)
        simple(f"copysign.{t}", t, 2)
        for c in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            reg = REGS[t]
            op(f"setp_{c}_{t}", t, f"setp.{c}.{t} %p1, {reg}1, {reg}2; selp.b32 %r9, 1, 0, %p1;", "%r9")
    for rounding in ("rz", "rm", "rp"):
        for i, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            simple(f"{i}.{rounding}.f32", "f32", n)
    for i, n in (("add.rn", 2), ("mul.rn", 2), ("fma.rn", 3), ("div.rn", 2), ("sqrt.rn", 1), ("rcp.rn", 1)):
        simple(f"{i}.ftz.f32", "f32", n)
    for i, n in (("add.sat", 2), ("mul.sat", 2), ("fma.rn.sat", 3)):
        simple(f"{i}.f32", "f32", n)
    for i in ("min.ftz", "max.ftz"):
        simple(f"{i}.f32", "f32", 2)
    for i in ("rcp.approx", "sqrt.approx", "rsqrt.approx", "ex2.approx", "lg2.approx"):
        simple(f"{i}.f32", "f32", 1, approx=True)
        simple(f"{i}.ftz.f32", "f32", 1, approx=True)
    simple("div.full.f32", "f32", 2, approx=True)
    # Conversions.
    ints = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")

    def place(t):
        return "%rd9" if t.endswith("64") else "%r9"

    for t, k in (("f32", "f32"), ("f64", "f64")):
        for to in ("u16", "s16", "u32", "s32", "u64", "s64", "u8", "s8"):
            for rounding in ("rni", "rzi", "rmi", "rpi"):
                if rounding != "rzi" and to not in ("u32", "s32", "s64"):
                    continue
                tail = ""
                target = place(to)
                if to in ("u16", "s16"):
                    target, tail = "%h1", f"cvt.{to[0]}32.{to} %r9, %h1;"
                op(f"cvt_{rounding}_{to}_{t}", k, f"cvt.{rounding}.{to}.{t} {target}, {REGS[k]}1; {tail}", "%rd9" if to.endswith("64") else "%r9")
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            op(f"cvt_{rounding}_{t}_{t}", k, f"cvt.{rounding}.{t}.{t} {REGS[k]}9, {REGS[k]}1;", REGS[k] + "9")
    op("cvt_rn_f32_f64", "f64", "cvt.rn.f32.f64 %f9, %fd1;", "%f9")
    for t, k in (("u32", "i32"), ("s32", "i32"), ("u64", "i64"), ("s64", "i64")):
        op(f"cvt_rn_f32_{t}", k, f"cvt.rn.f32.{t} %f9, {REGS[k]}1;", "%f9")
        op(f"cvt_rn_f64_{t}", k, f"cvt.rn.f64.{t} %fd9, {REGS[k]}1;", "%fd9")
    op("cvt_f64_f32", "f32", "cvt.f64.f32 %fd9, %f1;", "%fd9")
    op("cvt_sat_f32_f32", "f32", "cvt.sat.f32.f32 %f9, %f1;", "%f9")
    for source, k in (("u32", "i32"), ("s32", "i32"), ("u64", "i64"), ("s64", "i64")):
        for to in ints:
            tail, target = "", place(to)
            if to in ("u16", "s16"):
                target, tail = "%h1", f"cvt.{to[0]}32.{to} %r9, %h1;"
            op(f"cvt_{to}_{source}", k, f"cvt.{to}.{source} {target}, {REGS[k]}1; {tail}", place(to))


def ptx():
    kernels()
    print("// Written by scripts/gpu/arith.py ptx.")
    print(".version 7.8\n.target sm_80\n.address_size 64\n")
    for name, kind, body, out in KERNELS:
        reg, bits = REGS[kind], BITS[kind]
        lines = "\n    ".join(s.strip() + ";" for s in body.split(";") if s.strip())
        store = {"%rd9": "b64", "%r9": "b32", "%f9": "f32", "%fd9": "f64"}[out]
        print(f""".visible .entry {kind}_{name}(.param .u64 p_in, .param .u64 p_out)
{{
    .reg .pred %p<4>;
    .reg .b16 %h<8>;
    .reg .b32 %r<24>;
    .reg .b64 %rd<24>;
    .reg .f32 %f<12>;
    .reg .f64 %fd<12>;
    mov.u32 %r20, %tid.x;
    ld.param.u64 %rd20, [p_in];
    ld.param.u64 %rd21, [p_out];
    mad.wide.u32 %rd20, %r20, 24, %rd20;
    mad.wide.u32 %rd21, %r20, 8, %rd21;
    ld.global.{bits} {reg}1, [%rd20];
    ld.global.{bits} {reg}2, [%rd20+8];
    ld.global.{bits} {reg}3, [%rd20+16];
    {lines}
    st.global.{store} [%rd21], {out};
    ret;
}}
""")


def random(seed=0x9E3779B97F4A7C15):
    mask = (1 << 64) - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def inputs(kind):
    """96 triples of words: special values against each other, then random ones of every magnitude."""
    word = random()
    if kind == "i32":
        special = [0, 1, 2, 31, 32, 0x3C00, 0x7BFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00010001, 0xFFFF7C01, 0x12345678]
        free = lambda: next(word) & 0xFFFFFFFF
    elif kind == "i64":
        special = [0, 1, 2, 63, 64, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0, (1 << 53) + 1, (1 << 24) + 1]
        free = lambda: next(word) >> (next(word) % 60)
    elif kind == "f32":
        special = [0x0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x1, 0x807FFFFF,
                   0x00800000, 0x7F7FFFFF, 0x3F000000, 0x40200000, 0xC0200000, 0x4F000000, 0x33800001]
        free = lambda: (next(word) & 0x807FFFFF) | ((96 + next(word) % 64) << 23)
    else:
        bits = lambda v: struct.unpack("<Q", struct.pack("<d", v))[0]
        special = [bits(v) for v in (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 0.5, 2.5, -2.5, 5e-324, -2.2e-308,
                                     2.3e-308, 1.7976931348623157e308, 2147483648.5, 1e-40, 3.4028235e38, 65519.9, 1 + 2**-52)]
        special.append(0x7FF8000000000000)
        free = lambda: (next(word) & 0x800FFFFFFFFFFFFF) | ((960 + next(word) % 128) << 52)
    out = []
    for i in range(48):
        n = len(special)
        out.append((special[i % n], special[(i * 7 + i // n) % n], special[(i * 5 + 3 * (i // n)) % n]))
    while len(out) < 96:
        out.append((free(), free(), free()))
    return out


def run(path):
    cuda = ctypes.CDLL(os.environ.get("MPSSHIM_CUDA_LIBRARY", "libcuda.so.1"))

    def call(name, *arguments):
        status = getattr(cuda, name)(*arguments)
        if status != 0:
            sys.exit(f"{name} gave error {status}")

    image = open(path, "rb").read() + b"\0"
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    log = ctypes.create_string_buffer(4096)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), 4096)
    status = cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
    if status != 0:
        sys.exit(f"cuModuleLoadDataEx gave error {status}: {log.value.decode()}")
    name = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", name, 100, 0)
    print(f"# {name.value.decode()}")
    buffers = {}
    for kind in REGS:
        triples = inputs(kind)
        words = [w for triple in triples for w in triple]
        for a, b, c in triples:
            print(f"in {kind} {a:x} {b:x} {c:x}")
        source, result = ctypes.c_uint64(), ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(8 * len(words)))
        call("cuMemAlloc_v2", ctypes.byref(result), ctypes.c_size_t(8 * len(triples)))
        call("cuMemcpyHtoD_v2", source, (ctypes.c_uint64 * len(words))(*words), ctypes.c_size_t(8 * len(words)))
        buffers[kind] = (source, result, len(triples))
    for entry in re.findall(r"\.entry (\w+)\(", image.decode(errors="replace")):
        source, result, count = buffers[entry.split("_")[0]]
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        call("cuMemsetD8_v2", result, ctypes.c_ubyte(0), ctypes.c_size_t(8 * count))
        parameters = (ctypes.c_void_p * 2)(ctypes.addressof(source), ctypes.addressof(result))
        call("cuLaunchKernel", function, 1, 1, 1, count, 1, 1, 0, None, parameters, None)
        words = (ctypes.c_uint64 * count)()
        call("cuMemcpyDtoH_v2", words, result, ctypes.c_size_t(8 * count))
        print("out", entry, *(f"{w:x}" for w in words))


if sys.argv[1:] == ["ptx"]:
    ptx()
elif len(sys.argv) == 3 and sys.argv[1] == "run":
    run(sys.argv[2])
else:
    sys.exit(__doc__)
