//! Mnemonics and their operations. The table is the arithmetic: each line defines an instruction.

// The same expression serves types of all sizes, for one of which a cast does nothing.
#![allow(clippy::unnecessary_cast)]

use super::code::{Alu, Inst, Regs, Ty};

/// A mnemonic cut at its dots: `mad.lo.cc.u32` is base `mad`, modifiers `lo cc`, types `u32`.
pub struct Mnemonic<'a> {
    pub base: &'a str,
    pub mods: Vec<&'a str>,
    pub types: Vec<Ty>,
}

impl<'a> Mnemonic<'a> {
    pub fn new(word: &'a str) -> Self {
        let mut parts = word.split('.');
        let base = parts.next().unwrap_or_default();
        let (mut mods, mut types) = (Vec::new(), Vec::new());
        for part in parts {
            match Ty::parse(part) {
                Some(ty) => types.push(ty),
                None => mods.push(part),
            }
        }
        Mnemonic { base, mods, types }
    }
    pub fn has(&self, name: &str) -> bool {
        self.mods.contains(&name)
    }
    pub fn only(&self, allowed: &[&str]) -> Option<()> {
        let known = self.mods.iter().all(|m| allowed.contains(m));
        known.then_some(())
    }
    pub fn ty(&self) -> Option<Ty> {
        self.types.first().copied()
    }
    /// The value that `choices` gives for the first modifier it names.
    pub fn choose<T: Copy>(&self, choices: &[(&str, T)]) -> Option<T> {
        let of = |m: &&str| choices.iter().find(|(name, _)| name == m);
        self.mods.iter().find_map(of).map(|&(_, value)| value)
    }
    fn flags(&self) -> Flags {
        let bits = self.mods.iter().map(|m| match *m {
            "rz" => ZERO,
            "rm" => DOWN,
            "rp" => UP,
            "rzi" => ZERO | INTEGRAL,
            "rmi" => DOWN | INTEGRAL,
            "rpi" => UP | INTEGRAL,
            "rni" => INTEGRAL,
            "ftz" => FTZ,
            "sat" => SAT,
            _ => 0,
        });
        Flags(bits.fold(NEAREST, |all, bit| all | bit))
    }
}

/// The modifiers of one floating-point instruction, packed into its `imm`.
#[derive(Clone, Copy)]
struct Flags(i32);

const NEAREST: i32 = 0;
const ZERO: i32 = 1;
const DOWN: i32 = 2;
const UP: i32 = 3;
const FTZ: i32 = 4;
const SAT: i32 = 8;
const INTEGRAL: i32 = 16;

impl Flags {
    fn mode(self) -> i32 {
        self.0 & 3
    }
    fn has(self, flag: i32) -> bool {
        self.0 & flag != 0
    }
    fn integral(self, v: f64) -> f64 {
        match self.mode() {
            NEAREST => v.round_ties_even(),
            ZERO => v.trunc(),
            DOWN => v.floor(),
            _ => v.ceil(),
        }
    }
    /// The exact sum of two doubles, rounded to single precision.
    fn sum32(self, a: f64, b: f64) -> f32 {
        let near = a + b;
        let rounding = near - a;
        let error = (a - (near - rounding)) + (b - rounding);
        if near == 0.0 {
            let positive = a == 0.0 && a.is_sign_positive() && b.is_sign_positive();
            let negative = self.mode() == DOWN && !positive;
            return if negative { -0.0 } else { near as f32 };
        }
        let r = near as f32;
        let missing = (near - f64::from(r)) + error;
        let (down, up) = match self.mode() {
            NEAREST => (false, false),
            ZERO => (near > 0.0, near < 0.0),
            mode => (mode == DOWN, mode == UP),
        };
        match () {
            () if !near.is_finite() => r,
            // Too large: infinite unless rounding goes the other way.
            () if r.is_infinite() && (down && r > 0.0 || up && r < 0.0) => f32::MAX.copysign(r),
            () if r.is_infinite() => r,
            () if down && missing < 0.0 => r.next_down(),
            () if up && missing > 0.0 => r.next_up(),
            () => r,
        }
    }
}

/// How a value of a type lies in a register.
trait Value: Copy {
    fn get(word: u64) -> Self;
    fn put(self) -> u64;
    /// Flushes a subnormal source, if the instruction says so.
    #[inline(always)]
    fn input(self, _: Flags) -> Self {
        self
    }
}

macro_rules! values {
    ($($t:ty: |$w:ident| $get:expr, |$v:ident| $put:expr;)*) => {$(
        impl Value for $t {
            #[inline(always)]
            fn get($w: u64) -> Self { $get }
            #[inline(always)]
            fn put(self) -> u64 { let $v = self; $put }
        }
    )*};
}
values! {
    u8: |w| w as u8, |v| v as u64;
    u16: |w| w as u16, |v| v as u64;
    u32: |w| w as u32, |v| v as u64;
    u64: |w| w, |v| v;
    i8: |w| w as i8, |v| v as u64;
    i16: |w| w as i16, |v| v as u64;
    i32: |w| w as i32, |v| v as u64;
    i64: |w| w as i64, |v| v as u64;
    bool: |w| w & 1 != 0, |v| v as u64;
    f64: |w| f64::from_bits(w), |v| v.to_bits();
}
impl Value for f32 {
    #[inline(always)]
    fn get(word: u64) -> Self {
        f32::from_bits(word as u32)
    }
    /// Every NaN that single-precision arithmetic makes is this one.
    #[inline(always)]
    fn put(self) -> u64 {
        if self.is_nan() {
            0x7FFF_FFFF
        } else {
            u64::from(self.to_bits())
        }
    }
    #[inline(always)]
    fn input(self, f: Flags) -> Self {
        if f.has(FTZ) && self.is_subnormal() {
            0f32.copysign(self)
        } else {
            self
        }
    }
}

/// What rounding needs of a float.
trait Float: Value {
    fn wide(self) -> f64;
    fn narrow(v: f64) -> Self;
    /// A result that is `near`, or the sum of two doubles if not rounded to nearest.
    fn rounded(near: Self, f: Flags, exact: impl FnOnce() -> (f64, f64)) -> Self;
}
impl Float for f32 {
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn narrow(v: f64) -> Self {
        v as f32
    }
    /// Saturated to [0, 1] and flushed if the instruction says so.
    #[inline(always)]
    fn rounded(near: Self, f: Flags, exact: impl FnOnce() -> (f64, f64)) -> Self {
        let v = if f.mode() == NEAREST {
            near
        } else {
            let (a, b) = exact();
            f.sum32(a, b)
        };
        match v {
            _ if !f.has(SAT) => v.input(f),
            // NaN becomes +0.
            v if v > 0.0 => v.min(1.0).input(f),
            _ => 0.0,
        }
    }
}
impl Float for f64 {
    fn wide(self) -> f64 {
        self
    }
    fn narrow(v: f64) -> Self {
        v
    }
    #[inline(always)]
    fn rounded(near: Self, _: Flags, _: impl FnOnce() -> (f64, f64)) -> Self {
        near
    }
}

// `T` inside the operations below is the type of the arm that a macro expands.
macro_rules! pick {
    ($ty:expr, [$($arm:ident: $t:ty),*], $op:expr) => {
        match $ty {
            $(Ty::$arm => { type T = $t; Some($op as Alu) })*
            _ => None,
        }
    };
}
macro_rules! op {
    (|$($v:ident),*| $e:expr) => {
        |r: Regs, i: &Inst| {
            let [$($v,)* ..] = [i.a, i.b, i.c].map(|x| T::get(r.get(x)));
            r.set(i.d, Value::put($e));
        }
    };
}
macro_rules! ints {
    ($ty:expr, |$($v:ident),*| $e:expr) => { ints!($ty, op!(|$($v),*| $e)) };
    ($ty:expr, $op:expr) => {
        pick!($ty, [U16: u16, U32: u32, U64: u64, S16: i16, S32: i32, S64: i64], $op)
    };
}
macro_rules! all_ints {
    ($ty:expr, $op:expr) => {
        pick!($ty, [U8: u8, U16: u16, U32: u32, U64: u64, S8: i8, S16: i16, S32: i32, S64: i64], $op)
    };
}
macro_rules! bits {
    ($ty:expr, |$($v:ident),*| $e:expr) => { bits!($ty, op!(|$($v),*| $e)) };
    ($ty:expr, $op:expr) => { pick!($ty.bits(), [U8: u8, U16: u16, U32: u32, U64: u64], $op) };
}
/// Operations on 32-bit registers that look at all three sources as plain numbers.
macro_rules! words {
    ($ty:expr, |$i:ident, $a:ident, $b:ident, $c:ident| $e:expr) => {
        ($ty == Ty::U32).then_some(
            (|r: Regs, $i: &Inst| {
                let [$a, $b, $c] = [$i.a, $i.b, $i.c].map(|x| r.get(x) & 0xFFFF_FFFF);
                r.set($i.d, $e);
            }) as Alu,
        )
    };
}
// Without modifiers, the usual case, the flags are a constant and what looks at them vanishes.
macro_rules! floats {
    ($ty:expr, $flags:expr, |$($v:ident),*| $near:expr) => {
        floats!($ty, $flags, |$($v),*| $near, (0.0, 0.0))
    };
    ($ty:expr, $flags:expr, |$($v:ident),*| $near:expr, $exact:expr) => {
        if $flags.0 == 0 {
            floats!(@ $ty, |i| Flags(0), [$($v),*], $near, $exact)
        } else {
            floats!(@ $ty, |i| Flags(i.imm), [$($v),*], $near, $exact)
        }
    };
    (@ $ty:expr, |$i:ident| $flags:expr, [$($v:ident),*], $near:expr, $exact:expr) => {
        pick!($ty, [F32: f32, F64: f64], |r: Regs, $i: &Inst| {
            let f = $flags;
            let [$($v,)* ..] = [$i.a, $i.b, $i.c].map(|x| T::get(r.get(x)).input(f));
            r.set($i.d, T::rounded($near, f, || $exact).put());
        })
    };
}

/// The operation for a mnemonic on registers, its number of sources and its `imm`.
pub fn select(m: &Mnemonic<'_>) -> Option<(Alu, usize, i32)> {
    let ty = m.ty()?;
    if m.has("cc") || matches!(m.base, "addc" | "subc" | "madc") {
        return carry(m, ty).map(|(alu, sources)| (alu, sources, 0));
    }
    let sources = match m.base {
        "neg" | "abs" | "not" | "brev" | "popc" | "clz" | "rcp" | "sqrt" | "rsqrt" | "ex2"
        | "lg2" | "sin" | "cos" => 1,
        "mad" | "fma" | "shf" | "bfe" | "prmt" | "lop3" | "selp" => 3,
        "bfi" => 4,
        _ => 2,
    };
    if ty.is_float() && !matches!(m.base, "selp" | "copysign") {
        return Some((float(m, ty)?, sources, m.flags().0));
    }
    // A modifier that is not known here would change what the instruction does.
    m.only(match m.base {
        "mul" | "mad" => &["lo", "hi", "wide"],
        "shf" => &["l", "r", "wrap", "clamp"],
        _ => &[],
    })?;
    let (low, high, wide) = (m.has("lo"), m.has("hi"), m.has("wide"));
    let alu = match m.base {
        "add" => ints!(ty, |a, b| a.wrapping_add(b)),
        "sub" => ints!(ty, |a, b| a.wrapping_sub(b)),
        "mul" if low => ints!(ty, |a, b| a.wrapping_mul(b)),
        "mul" if high => {
            ints!(ty, |a, b| ((a as i128).wrapping_mul(b as i128) >> T::BITS)
                as T)
        }
        "mul" if wide && ty.bytes() < 8 => {
            ints!(ty, |a, b| (a as i64).wrapping_mul(b as i64))
        }
        "mad" if low => ints!(ty, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "mad" if wide && ty.bytes() < 8 => ints!(ty, |r: Regs, i: &Inst| {
            let [a, b] = [i.a, i.b].map(|x| T::get(r.get(x)) as i64);
            r.set(i.d, a.wrapping_mul(b).wrapping_add(r.get(i.c) as i64).put());
        }),
        "div" => ints!(ty, |a, b| if b == 0 { T::MAX } else { a.wrapping_div(b) }),
        "rem" => ints!(ty, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
        "min" => ints!(ty, |a, b| a.min(b)),
        "max" => ints!(ty, |a, b| a.max(b)),
        "abs" => pick!(ty, [S16: i16, S32: i32, S64: i64], op!(|a| a.wrapping_abs())),
        "neg" => pick!(ty, [S16: i16, S32: i32, S64: i64], op!(|a| a.wrapping_neg())),
        "and" | "or" | "xor" => logic(m.base),
        "not" if ty == Ty::Pred => Some((|r, i| r.set(i.d, r.get(i.a) & 1 ^ 1)) as Alu),
        "not" => bits!(ty, |a| !a),
        "brev" => bits!(ty, |a| a.reverse_bits()),
        "popc" => bits!(ty, |a| a.count_ones()),
        "clz" => bits!(ty, |a| a.leading_zeros()),
        "shl" => bits!(ty, |r: Regs, i: &Inst| {
            let (a, n) = (T::get(r.get(i.a)), r.get(i.b) as u32);
            r.set(i.d, a.checked_shl(n).unwrap_or(0).put());
        }),
        "shr" => ints!(ty, |r: Regs, i: &Inst| {
            let (a, n) = (T::get(r.get(i.a)), r.get(i.b) as u32);
            r.set(
                i.d,
                if n < T::BITS {
                    a >> n
                } else {
                    (a >> (T::BITS - 1)) >> 1
                }
                .put(),
            );
        }),
        "shf" => match (m.has("l"), m.has("wrap")) {
            (true, true) => words!(ty, |_i, a, b, c| (b << 32 | a) << (c & 31) >> 32),
            (true, false) => words!(ty, |_i, a, b, c| {
                (u128::from(b << 32 | a) << c.min(32) >> 32) as u64
            }),
            (false, true) => words!(ty, |_i, a, b, c| (b << 32 | a) >> (c & 31)),
            (false, false) => words!(ty, |_i, a, b, c| (b << 32 | a) >> c.min(32)),
        },
        "bfe" => pick!(ty, [U32: u32, S32: i32], op!(|a, b, c| {
            let (at, n) = (b as u8, c as u8);
            // Beyond the number there are copies of its sign; the field's own sign fills up the result.
            let field = (a as i64).checked_shr(at.into()).unwrap_or(a as i64 >> 63);
            let unused = 64 - u32::from(n.min(64));
            let field = field.checked_shl(unused).unwrap_or(0);
            (if T::MIN != 0 { field.checked_shr(unused).unwrap_or(0) } else {
                (field as u64).checked_shr(unused).unwrap_or(0) as i64
            }) as T
        })),
        "bfi" => pick!(ty, [U32: u32, U64: u64], |r: Regs, i: &Inst| {
            let (a, b) = (r.get(i.a), r.get(i.b));
            let (at, n) = (r.get(i.c) as u32 & 0xFF, r.get(i.imm as u16) as u32 & 0xFF);
            let mask = u64::MAX.checked_shl(n).map_or(u64::MAX, |m| !m);
            let mask = mask.checked_shl(at).unwrap_or(0);
            r.set(i.d, (b & !mask | a.checked_shl(at).unwrap_or(0) & mask) as T as u64);
        }),
        "prmt" => words!(ty, |_i, a, b, c| {
            let byte = |n: u64| {
                let byte = ((b << 32 | a) >> (8 * (n & 7))) as u8;
                if n & 8 != 0 {
                    (byte as i8 >> 7) as u8
                } else {
                    byte
                }
            };
            (0..4).fold(0, |out, at| {
                out | u64::from(byte(c >> (4 * at) & 15)) << (8 * at)
            })
        }),
        "lop3" => words!(ty, |i, a, b, c| {
            let term = |v: u64, holds: i32| if holds != 0 { v } else { !v };
            let rows = (0..8).filter(|row| i.imm >> row & 1 != 0);
            let row = |row: i32| term(a, row & 4) & term(b, row & 2) & term(c, row & 1);
            rows.fold(0, |out, n| out | row(n)) & 0xFFFF_FFFF
        }),
        "selp" => Some(
            (|r, i| {
                r.set(
                    i.d,
                    if r.get(i.c) & 1 != 0 {
                        r.get(i.a)
                    } else {
                        r.get(i.b)
                    },
                );
            }) as Alu,
        ),
        // Bits, not arithmetic: a NaN keeps its payload.
        "copysign" => pick!(ty, [F32: f32, F64: f64], |r: Regs, i: &Inst| {
            r.set(i.d, T::get(r.get(i.b)).copysign(T::get(r.get(i.a))).to_bits() as u64);
        }),
        _ => None,
    };
    Some((alu?, sources, 0))
}

/// On whole registers: bits beyond the type are not read by anyone.
pub fn logic(name: &str) -> Option<Alu> {
    Some(match name {
        "and" => |r, i| r.set(i.d, r.get(i.a) & r.get(i.b)),
        "or" => |r, i| r.set(i.d, r.get(i.a) | r.get(i.b)),
        "xor" => |r, i| r.set(i.d, r.get(i.a) ^ r.get(i.b)),
        _ => return None,
    })
}

/// Arithmetic with the carry register, whose number is in `imm`.
fn carry(m: &Mnemonic<'_>, ty: Ty) -> Option<(Alu, usize)> {
    m.only(&["cc", "lo", "hi"])?;
    // Whether the carry is added, and whether it is made: a flag each in `n`.
    macro_rules! with {
        (|$a:ident, $b:ident, $c:ident, $carry:ident| $sum:expr) => {
            pick!(ty.bits(), [U32: u32, U64: u64], |r: Regs, i: &Inst| {
                let [$a, $b, $c] = [i.a, i.b, i.c].map(|x| T::get(r.get(x)) as i128);
                let $carry = if i.n & TAKES != 0 { r.get(i.imm as u16) as i128 & 1 } else { 0 };
                let sum: i128 = $sum;
                r.set(i.d, sum as T as u64);
                if i.n & GIVES != 0 {
                    // A borrow shows as a negative sum: the flag is the bit above the result either way.
                    r.set(i.imm as u16, (sum >> T::BITS) as u64 & 1);
                }
            })
        };
    }
    Some(match m.base {
        "add" | "addc" => (with!(|a, b, _c, carry| a + b + carry)?, 2),
        "sub" | "subc" => (with!(|a, b, _c, carry| a - b - carry)?, 2),
        "mad" | "madc" if m.has("hi") && !ty.is_signed() => (
            with!(|a, b, c, carry| (((a as u128 * b as u128) >> T::BITS) as i128) + c + carry)?,
            3,
        ),
        "mad" | "madc" if m.has("lo") => (
            with!(|a, b, c, carry| (a.wrapping_mul(b) as T as i128) + c + carry)?,
            3,
        ),
        _ => return None,
    })
}

/// `Inst::n` of the instructions that use the carry.
const TAKES: u8 = 1;
const GIVES: u8 = 2;

/// What `Inst::n` says about the carry; zero for an instruction that does not use it.
pub fn uses_carry(m: &Mnemonic<'_>) -> u8 {
    let takes = matches!(m.base, "addc" | "subc" | "madc");
    (if takes { TAKES } else { 0 }) | (if m.has("cc") { GIVES } else { 0 })
}

fn float(m: &Mnemonic<'_>, ty: Ty) -> Option<Alu> {
    m.only(match m.base {
        "add" | "sub" | "mul" | "fma" | "mad" => &["rn", "rz", "rm", "rp", "ftz", "sat"],
        "div" | "rcp" | "sqrt" => &["rn", "ftz", "approx", "full"],
        "min" | "max" | "abs" | "neg" => &["ftz"],
        _ => &["approx", "ftz"],
    })?;
    let flags = m.flags();
    if ty == Ty::F64 && flags.0 & !FTZ != 0 {
        return None;
    }
    // An operation, and (where a rounding can be chosen) two doubles whose sum is its exact result.
    match m.base {
        "add" => floats!(ty, flags, |a, b| a + b, (a.wide(), b.wide())),
        "sub" => floats!(ty, flags, |a, b| a - b, (a.wide(), -b.wide())),
        "mul" => floats!(ty, flags, |a, b| a * b, {
            let product = a.wide() * b.wide();
            (product, 0f64.copysign(product))
        }),
        "fma" | "mad" => {
            floats!(
                ty,
                flags,
                |a, b, c| a.mul_add(b, c),
                (a.wide() * b.wide(), c.wide())
            )
        }
        "div" => floats!(ty, flags, |a, b| a / b),
        "rcp" => floats!(ty, flags, |a| 1.0 / a),
        "sqrt" => floats!(ty, flags, |a| a.sqrt()),
        "min" => floats!(ty, flags, |a, b| lesser(a, b)),
        "max" => floats!(ty, flags, |a, b| -lesser(-a, -b)),
        "abs" => floats!(ty, flags, |a| a.abs()),
        "neg" => floats!(ty, flags, |a| -a),
        "rsqrt" => floats!(ty, flags, |a| T::narrow(1.0 / a.wide().sqrt())),
        "ex2" => floats!(ty, flags, |a| T::narrow(a.wide().exp2())),
        "lg2" => floats!(ty, flags, |a| T::narrow(a.wide().log2())),
        "sin" => floats!(ty, flags, |a| T::narrow(a.wide().sin())),
        "cos" => floats!(ty, flags, |a| T::narrow(a.wide().cos())),
        _ => None,
    }
}

/// The lesser of two numbers; -0 is less than +0, and NaN gives way to the other one.
fn lesser<F: Float + PartialOrd>(a: F, b: F) -> F {
    let (x, y) = (a.wide(), b.wide());
    let first = y.is_nan() || x < y || x == y && x.is_sign_negative();
    if first { a } else { b }
}

/// The comparison of `setp` for operands of type `ty`, and its `imm`.
pub fn compare(m: &Mnemonic<'_>, ty: Ty) -> Option<(Alu, i32)> {
    use std::cmp::Ordering::{Equal, Greater, Less};
    macro_rules! test {
        (|$order:ident| $e:expr) => {
            pick!(ty, [U16: u16, U32: u32, U64: u64, S16: i16, S32: i32, S64: i64, F32: f32, F64: f64],
                |r: Regs, i: &Inst| {
                    let [a, b] = [i.a, i.b].map(|x| T::get(r.get(x)).input(Flags(i.imm)));
                    let $order = a.partial_cmp(&b);
                    r.set(i.d, $e.put());
                })
        };
    }
    // An order of two numbers, or none if one is NaN; the forms that end in `u` hold then, too.
    let alu = match *m.mods.first()? {
        "eq" => test!(|o| o == Some(Equal)),
        "ne" => test!(|o| o.is_some_and(|o| o != Equal)),
        "lt" | "lo" => test!(|o| o == Some(Less)),
        "le" | "ls" => test!(|o| matches!(o, Some(Less | Equal))),
        "gt" | "hi" => test!(|o| o == Some(Greater)),
        "ge" | "hs" => test!(|o| matches!(o, Some(Greater | Equal))),
        "equ" => test!(|o| matches!(o, None | Some(Equal))),
        "neu" => test!(|o| o != Some(Equal)),
        "ltu" => test!(|o| matches!(o, None | Some(Less))),
        "leu" => test!(|o| o != Some(Greater)),
        "gtu" => test!(|o| matches!(o, None | Some(Greater))),
        "geu" => test!(|o| o != Some(Less)),
        "num" => test!(|o| o.is_some()),
        "nan" => test!(|o| o.is_none()),
        _ => None,
    };
    Some((alu?, m.flags().0))
}

/// The steps of a conversion, each reading its source from `a`; `imm` is the same for all.
pub fn convert(m: &Mnemonic<'_>) -> Option<(Vec<Alu>, i32)> {
    let [to, from] = m.types[..] else { return None };
    let (to_float, from_float) = (to.is_float(), from.is_float());
    m.only(match (from_float, to_float) {
        (false, false) => &[],
        (false, true) => &["rn"],
        (true, false) => &["rni", "rzi", "rmi", "rpi", "ftz"],
        (true, true) => &["rn", "rni", "rzi", "rmi", "rpi", "ftz", "sat"],
    })?;
    let widen = pick!(from, [F32: f32, F64: f64], |r: Regs, i: &Inst| {
        r.set(i.d, T::get(r.get(i.a)).input(Flags(i.imm)).wide().put());
    });
    let steps = match (from_float, to_float) {
        (false, false) => vec![all_ints!(from, op!(|a| a))?, all_ints!(to, op!(|a| a))?],
        (false, true) if to == Ty::F32 => vec![all_ints!(from, op!(|a| a as f32))?],
        (false, true) => vec![all_ints!(from, op!(|a| a as f64))?],
        // NaN gives zero from single to 32 bits or less, and the highest bit alone otherwise.
        (true, false) if from == Ty::F64 || to.bytes() == 8 => {
            let store = all_ints!(to, |r: Regs, i: &Inst| {
                let v = Flags(i.imm).integral(f64::get(r.get(i.a)));
                r.set(
                    i.d,
                    if v.is_nan() {
                        (1u64 << (T::BITS - 1)) as T
                    } else {
                        v as T
                    }
                    .put(),
                );
            });
            vec![widen?, store?]
        }
        (true, false) => {
            let store = all_ints!(to, |r: Regs, i: &Inst| {
                r.set(
                    i.d,
                    (Flags(i.imm).integral(f64::get(r.get(i.a))) as T).put(),
                );
            });
            vec![widen?, store?]
        }
        (true, true) => {
            let store = pick!(to, [F32: f32, F64: f64], |r: Regs, i: &Inst| {
                let (v, f) = (f64::get(r.get(i.a)), Flags(i.imm));
                let v = if f.has(INTEGRAL) { f.integral(v) } else { v };
                // The rounding is done; what is left is to saturate and to flush.
                r.set(i.d, T::rounded(T::narrow(v), Flags(f.0 & (SAT | FTZ)), || (v, 0.0)).put());
            });
            vec![widen?, store?]
        }
    };
    Some((steps, m.flags().0))
}
