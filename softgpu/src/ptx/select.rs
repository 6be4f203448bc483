//! Which operation a mnemonic means. The table is the arithmetic: each line says what an instruction does.

// The same expression serves types of all sizes, for one of which a cast does nothing.
#![allow(clippy::unnecessary_cast)]

use super::code::{Alu, Inst, Regs};
use super::half::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ty {
    Pred,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Ty {
    pub fn parse(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "u8" | "b8" => Ty::U8,
            "u16" | "b16" => Ty::U16,
            "u32" | "b32" => Ty::U32,
            "u64" | "b64" => Ty::U64,
            "s8" => Ty::S8,
            "s16" => Ty::S16,
            "s32" => Ty::S32,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "f16x2" => Ty::F16x2,
            "bf16" => Ty::Bf16,
            "bf16x2" => Ty::Bf16x2,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            _ => return None,
        })
    }
    pub fn bytes(self) -> u32 {
        match self {
            Ty::Pred | Ty::U8 | Ty::S8 => 1,
            Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::U32 | Ty::S32 | Ty::F32 | Ty::F16x2 | Ty::Bf16x2 => 4,
            Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }
    /// The unsigned type of the same size, for operations on bits.
    pub fn bits(self) -> Ty {
        match self.bytes() {
            1 => Ty::U8,
            2 => Ty::U16,
            4 => Ty::U32,
            _ => Ty::U64,
        }
    }
    pub fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }
    pub fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 | Ty::F32 | Ty::F64)
    }
    /// The type of one half of a packed pair.
    pub fn half(self) -> Option<Ty> {
        match self {
            Ty::F16x2 => Some(Ty::F16),
            Ty::Bf16x2 => Some(Ty::Bf16),
            _ => None,
        }
    }
}

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
        self.mods.iter().all(|m| allowed.contains(m)).then_some(())
    }
    pub fn ty(&self) -> Option<Ty> {
        self.types.first().copied()
    }
    pub fn flags(&self) -> Flags {
        let mut flags = NEAREST;
        for m in &self.mods {
            flags |= match *m {
                "rz" => ZERO,
                "rm" => DOWN,
                "rp" => UP,
                "rzi" => ZERO | INTEGRAL,
                "rmi" => DOWN | INTEGRAL,
                "rpi" => UP | INTEGRAL,
                "rni" => INTEGRAL,
                "ftz" => FTZ,
                "sat" => SAT,
                "NaN" => NAN,
                _ => 0,
            };
        }
        Flags(flags)
    }
}

/// How a value of a type lies in a register.
trait Value: Copy {
    fn get(word: u64) -> Self;
    fn put(self) -> u64;
}

macro_rules! integers {
    ($($t:ty as $wide:ty,)*) => {$(
        impl Value for $t {
            #[inline(always)]
            fn get(word: u64) -> Self { word as $t }
            #[inline(always)]
            fn put(self) -> u64 { self as $wide as u64 }
        }
    )*};
}
integers! { u8 as u64, u16 as u64, u32 as u64, u64 as u64, i8 as i64, i16 as i64, i32 as i64, i64 as i64, }

impl Value for bool {
    #[inline(always)]
    fn get(word: u64) -> Self {
        word & 1 != 0
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self)
    }
}
impl Value for f32 {
    #[inline(always)]
    fn get(word: u64) -> Self {
        f32::from_bits(word as u32)
    }
    /// Every NaN that single-precision arithmetic makes is this one.
    #[inline(always)]
    fn put(self) -> u64 {
        if self.is_nan() { 0x7FFF_FFFF } else { u64::from(self.to_bits()) }
    }
}
impl Value for f64 {
    #[inline(always)]
    fn get(word: u64) -> Self {
        f64::from_bits(word)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits()
    }
}

/// Binary16 and bfloat16, computed in double precision and rounded when stored.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Half(f64);
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Brain(f64);
impl Value for Half {
    fn get(word: u64) -> Self {
        Half(f64::from(from_f16(word as u16)))
    }
    fn put(self) -> u64 {
        u64::from(to_f16(self.0, Flags(NEAREST)))
    }
}
impl Value for Brain {
    fn get(word: u64) -> Self {
        Brain(f64::from(from_bf16(word as u16)))
    }
    fn put(self) -> u64 {
        u64::from(to_bf16(self.0, Flags(NEAREST)))
    }
}

/// What conversions and comparisons need of a float.
trait Float: Value + PartialOrd {
    fn wide(self) -> f64;
    fn from_wide(v: f64) -> Self;
}
macro_rules! float {
    ($($t:ty, |$v:ident| $wide:expr, |$w:ident| $narrow:expr;)*) => {$(
        impl Float for $t {
            #[inline(always)]
            fn wide(self) -> f64 { let $v = self; $wide }
            #[inline(always)]
            fn from_wide($w: f64) -> Self { $narrow }
        }
    )*};
}
float! {
    f32, |v| f64::from(v), |w| w as f32;
    f64, |v| v, |w| w;
    Half, |v| v.0, |w| Half(w);
    Brain, |v| v.0, |w| Brain(w);
}

// `T` inside the operations below is the type of the arm that the macro expands.
macro_rules! pick {
    ($ty:expr, [$($arm:ident: $t:ty),*], $op:expr) => {
        match $ty {
            $(Ty::$arm => { type T = $t; Some($op as Alu) })*
            _ => None,
        }
    };
}
macro_rules! ints {
    ($ty:expr, $op:expr) => {
        pick!($ty, [U16: u16, U32: u32, U64: u64, S16: i16, S32: i32, S64: i64], $op)
    };
}
macro_rules! signed {
    ($ty:expr, $op:expr) => { pick!($ty, [S16: i16, S32: i32, S64: i64], $op) };
}
macro_rules! bits {
    ($ty:expr, $op:expr) => { pick!($ty.bits(), [U8: u8, U16: u16, U32: u32, U64: u64], $op) };
}
macro_rules! floats {
    ($ty:expr, $op:expr) => { pick!($ty, [F32: f32, F64: f64, F16: Half, Bf16: Brain], $op) };
}
macro_rules! one {
    (|$a:ident| $e:expr) => {
        |r: Regs, i: &Inst| {
            let $a = T::get(r.get(i.a));
            r.set(i.d, Value::put($e));
        }
    };
}
macro_rules! two {
    (|$a:ident, $b:ident| $e:expr) => {
        |r: Regs, i: &Inst| {
            let ($a, $b) = (T::get(r.get(i.a)), T::get(r.get(i.b)));
            r.set(i.d, Value::put($e));
        }
    };
}
macro_rules! three {
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        |r: Regs, i: &Inst| {
            let ($a, $b, $c) = (T::get(r.get(i.a)), T::get(r.get(i.b)), T::get(r.get(i.c)));
            r.set(i.d, Value::put($e));
        }
    };
}

/// An operation as chosen: how many sources it reads and what goes into `imm`.
pub struct Selected {
    pub alu: Alu,
    pub sources: usize,
    pub imm: i32,
    /// Reads or writes the carry: `imm` is then the carry's register.
    pub carry: bool,
}

fn plain(alu: Option<Alu>, sources: usize) -> Option<Selected> {
    Some(Selected { alu: alu?, sources, imm: 0, carry: false })
}

/// The operation for a mnemonic on registers, or nothing if there is none.
pub fn alu(m: &Mnemonic<'_>) -> Option<Selected> {
    let ty = m.ty()?;
    if m.has("cc") || matches!(m.base, "addc" | "subc" | "madc") {
        return carry(m, ty);
    }
    if ty.is_float()
        && matches!(
            m.base,
            "add" | "sub" | "mul" | "fma" | "mad" | "div" | "rcp" | "sqrt" | "min" | "max" | "abs" | "neg"
        )
    {
        return float_alu(m, ty);
    }
    if ty == Ty::F32 && matches!(m.base, "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh") {
        return approximate(m);
    }
    // A modifier that is not known here would change what the instruction does.
    m.only(match m.base {
        "add" | "sub" => &["sat"],
        "mul" | "mad" => &["lo", "hi", "wide"],
        "mul24" | "mad24" => &["lo"],
        "shf" => &["l", "r", "wrap", "clamp"],
        "bfind" => &["shiftamt"],
        "testp" => &["finite", "infinite", "number", "notanumber", "normal", "subnormal"],
        _ => &[],
    })?;
    match m.base {
        "add" if m.has("sat") => plain(pick!(ty, [S32: i32], two!(|a, b| a.saturating_add(b))), 2),
        "sub" if m.has("sat") => plain(pick!(ty, [S32: i32], two!(|a, b| a.saturating_sub(b))), 2),
        "add" => plain(ints!(ty, two!(|a, b| a.wrapping_add(b))), 2),
        "sub" => plain(ints!(ty, two!(|a, b| a.wrapping_sub(b))), 2),
        "mul" if m.has("wide") => plain(wide(ty, false), 2),
        "mad" if m.has("wide") => plain(wide(ty, true), 3),
        "mul" if m.has("lo") => plain(ints!(ty, two!(|a, b| a.wrapping_mul(b))), 2),
        "mad" if m.has("lo") => plain(ints!(ty, three!(|a, b, c| a.wrapping_mul(b).wrapping_add(c))), 3),
        "mul" if m.has("hi") => plain(ints!(ty, two!(|a, b| ((a as i128).wrapping_mul(b as i128) >> T::BITS) as T)), 2),
        "mad" if m.has("hi") => plain(
            ints!(ty, three!(|a, b, c| (((a as i128).wrapping_mul(b as i128) >> T::BITS) as T).wrapping_add(c))),
            3,
        ),
        "mul24" if m.has("lo") => plain(mul24(ty, false), 2),
        "mad24" if m.has("lo") => plain(mul24(ty, true), 3),
        "div" => plain(ints!(ty, two!(|a, b| if b == 0 { T::MAX } else { a.wrapping_div(b) })), 2),
        "rem" => plain(ints!(ty, two!(|a, b| if b == 0 { a } else { a.wrapping_rem(b) })), 2),
        "min" => plain(ints!(ty, two!(|a, b| a.min(b))), 2),
        "max" => plain(ints!(ty, two!(|a, b| a.max(b))), 2),
        "abs" => plain(signed!(ty, one!(|a| a.wrapping_abs())), 1),
        "neg" => plain(signed!(ty, one!(|a| a.wrapping_neg())), 1),
        "sad" => plain(ints!(ty, three!(|a, b, c| (a.abs_diff(b) as T).wrapping_add(c))), 3),
        "and" => plain(logic(ty, 0), 2),
        "or" => plain(logic(ty, 1), 2),
        "xor" => plain(logic(ty, 2), 2),
        "not" if ty == Ty::Pred => plain(Some(|r: Regs, i: &Inst| r.set(i.d, r.get(i.a) & 1 ^ 1)), 1),
        "not" => plain(bits!(ty, one!(|a| !a)), 1),
        "cnot" => plain(bits!(ty, one!(|a| T::from(a == 0))), 1),
        "shl" => plain(
            bits!(ty, |r: Regs, i: &Inst| {
                let (a, n) = (T::get(r.get(i.a)), r.get(i.b) as u32);
                r.set(i.d, a.checked_shl(n).unwrap_or(0).put());
            }),
            2,
        ),
        "shr" => plain(
            ints!(ty, |r: Regs, i: &Inst| {
                let (a, n) = (T::get(r.get(i.a)), r.get(i.b) as u32);
                r.set(i.d, if n < T::BITS { a >> n } else { (a >> (T::BITS - 1)) >> 1 }.put());
            }),
            2,
        ),
        "shf" if ty == Ty::U32 => plain(
            Some(match (m.has("l"), m.has("wrap")) {
                (true, wrap) if wrap => {
                    |r: Regs, i: &Inst| r.set(i.d, funnel(r, i) << (r.get(i.c) & 31) >> 32 & 0xFFFF_FFFF)
                }
                (true, _) => |r: Regs, i: &Inst| {
                    r.set(i.d, (u128::from(funnel(r, i)) << (r.get(i.c) as u32).min(32) >> 32) as u32 as u64)
                },
                (false, true) => |r: Regs, i: &Inst| r.set(i.d, funnel(r, i) >> (r.get(i.c) & 31) & 0xFFFF_FFFF),
                (false, _) => |r: Regs, i: &Inst| r.set(i.d, funnel(r, i) >> (r.get(i.c) as u32).min(32) & 0xFFFF_FFFF),
            }),
            3,
        ),
        "bfe" => plain(
            pick!(ty, [U32: u32, S32: i32, U64: u64, S64: i64], |r: Regs, i: &Inst| {
                let signed = T::MIN != 0;
                let word = T::get(r.get(i.a)) as u64 & (u64::MAX >> (64 - T::BITS));
                r.set(i.d, extract(word, r.get(i.b) as u8, r.get(i.c) as u8, T::BITS, signed) as T as u64);
            }),
            3,
        ),
        "bfi" => plain(
            pick!(ty, [U32: u32, U64: u64], |r: Regs, i: &Inst| {
                let (a, b) = (r.get(i.a), r.get(i.b));
                let (at, n) = (r.get(i.c) as u32 & 0xFF, r.get(i.imm as u16) as u32 & 0xFF);
                let mask = if n >= 64 { u64::MAX } else { (1 << n) - 1 }.checked_shl(at).unwrap_or(0);
                r.set(i.d, (b & !mask | a.checked_shl(at).unwrap_or(0) & mask) as T as u64);
            }),
            4,
        ),
        "brev" => plain(bits!(ty, one!(|a| a.reverse_bits())), 1),
        "popc" => plain(bits!(ty, one!(|a| a.count_ones())), 1),
        "clz" => plain(bits!(ty, one!(|a| a.leading_zeros())), 1),
        "bfind" => {
            let shift = m.has("shiftamt");
            plain(
                if shift {
                    pick!(ty, [U32: u32, U64: u64, S32: i32, S64: i64], one!(|a| lead(a as i64, T::BITS, T::MIN != 0).map_or(u32::MAX, |n| n)))
                } else {
                    pick!(ty, [U32: u32, U64: u64, S32: i32, S64: i64], one!(|a| lead(a as i64, T::BITS, T::MIN != 0).map_or(u32::MAX, |n| T::BITS - 1 - n)))
                },
                1,
            )
        }
        "prmt" => plain(
            Some(|r: Regs, i: &Inst| {
                let bytes = (r.get(i.a) & 0xFFFF_FFFF) | r.get(i.b) << 32;
                let choose = r.get(i.c);
                let mut out = 0;
                for at in 0..4 {
                    let pick = choose >> (4 * at) & 15;
                    let byte = (bytes >> (8 * (pick & 7))) as u8;
                    let byte = if pick & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
                    out |= u64::from(byte) << (8 * at);
                }
                r.set(i.d, out);
            }),
            3,
        ),
        "lop3" => plain(
            Some(|r: Regs, i: &Inst| {
                let (a, b, c) = (r.get(i.a) as u32, r.get(i.b) as u32, r.get(i.c) as u32);
                let mut out = 0;
                for row in 0..8 {
                    if i.imm >> row & 1 != 0 {
                        let term = |v: u32, bit: i32| if row & bit != 0 { v } else { !v };
                        out |= term(a, 4) & term(b, 2) & term(c, 1);
                    }
                }
                r.set(i.d, u64::from(out));
            }),
            3,
        ),
        "dp4a" => plain(dp4a(m), 3),
        "selp" => plain(
            bits!(ty, |r: Regs, i: &Inst| {
                let v = if r.get(i.c) & 1 != 0 { r.get(i.a) } else { r.get(i.b) };
                r.set(i.d, v as T as u64);
            }),
            3,
        ),
        "slct" => match m.types.get(1)? {
            Ty::S32 => plain(
                bits!(ty, |r: Regs, i: &Inst| {
                    r.set(i.d, if r.get(i.c) as i32 >= 0 { r.get(i.a) } else { r.get(i.b) } as T as u64);
                }),
                3,
            ),
            Ty::F32 => plain(
                bits!(ty, |r: Regs, i: &Inst| {
                    let pick = f32::get(r.get(i.c)) >= 0.0;
                    r.set(i.d, if pick { r.get(i.a) } else { r.get(i.b) } as T as u64);
                }),
                3,
            ),
            _ => None,
        },
        "copysign" => plain(
            pick!(ty, [F32: f32, F64: f64], |r: Regs, i: &Inst| {
                // Bits, not arithmetic: a NaN keeps its payload.
                r.set(i.d, T::get(r.get(i.b)).copysign(T::get(r.get(i.a))).to_bits() as u64);
            }),
            2,
        ),
        "testp" => testp(m, ty),
        _ => None,
    }
}

fn funnel(r: Regs, i: &Inst) -> u64 {
    r.get(i.b) << 32 | r.get(i.a) & 0xFFFF_FFFF
}

/// How far the highest significant bit lies from the top; for negative numbers the highest zero bit.
fn lead(v: i64, bits: u32, signed: bool) -> Option<u32> {
    let v = if signed && v < 0 { !v } else { v } as u64 & (u64::MAX >> (64 - bits));
    (v != 0).then(|| v.leading_zeros() - (64 - bits))
}

fn extract(word: u64, at: u8, n: u8, bits: u32, signed: bool) -> u64 {
    let (at, n) = (u32::from(at), u32::from(n));
    let mask = if n >= 64 { u64::MAX } else { (1 << n) - 1 };
    let field = word.checked_shr(at).unwrap_or(0) & mask;
    let sign = n > 0 && word >> (at + n - 1).min(bits - 1) & 1 != 0;
    let have = n.min(bits.saturating_sub(at));
    if signed && sign { field | u64::MAX.checked_shl(have).unwrap_or(0) } else { field }
}

fn wide(ty: Ty, add: bool) -> Option<Alu> {
    macro_rules! widen {
        ($($arm:ident: $t:ty => $w:ty),*) => {
            match (ty, add) {
                $((Ty::$arm, false) => Some((|r: Regs, i: &Inst| {
                    r.set(i.d, ((r.get(i.a) as $t as $w).wrapping_mul(r.get(i.b) as $t as $w)).put());
                }) as Alu),
                (Ty::$arm, true) => Some((|r: Regs, i: &Inst| {
                    let product = (r.get(i.a) as $t as $w).wrapping_mul(r.get(i.b) as $t as $w);
                    r.set(i.d, product.wrapping_add(r.get(i.c) as $w).put());
                }) as Alu),)*
                _ => None,
            }
        };
    }
    widen!(U16: u16 => u32, S16: i16 => i32, U32: u32 => u64, S32: i32 => i64)
}

fn mul24(ty: Ty, add: bool) -> Option<Alu> {
    match (ty, add) {
        (Ty::U32, false) => {
            Some(|r, i| r.set(i.d, ((r.get(i.a) & 0xFF_FFFF) * (r.get(i.b) & 0xFF_FFFF)) & 0xFFFF_FFFF))
        }
        (Ty::U32, true) => Some(|r, i| {
            let product = (r.get(i.a) & 0xFF_FFFF) * (r.get(i.b) & 0xFF_FFFF);
            r.set(i.d, product.wrapping_add(r.get(i.c)) & 0xFFFF_FFFF);
        }),
        (Ty::S32, _) => {
            fn low24(v: u64) -> i32 {
                (v as i32) << 8 >> 8
            }
            if add {
                Some(|r, i| {
                    r.set(i.d, low24(r.get(i.a)).wrapping_mul(low24(r.get(i.b))).wrapping_add(r.get(i.c) as i32).put())
                })
            } else {
                Some(|r, i| r.set(i.d, low24(r.get(i.a)).wrapping_mul(low24(r.get(i.b))).put()))
            }
        }
        _ => None,
    }
}

pub fn logic(ty: Ty, which: u8) -> Option<Alu> {
    // On whole registers: bits beyond the type are not read by anyone.
    (!ty.is_float()).then_some(match which {
        0 => |r: Regs, i: &Inst| r.set(i.d, r.get(i.a) & r.get(i.b)),
        1 => |r: Regs, i: &Inst| r.set(i.d, r.get(i.a) | r.get(i.b)),
        _ => |r: Regs, i: &Inst| r.set(i.d, r.get(i.a) ^ r.get(i.b)),
    })
}

fn dp4a(m: &Mnemonic<'_>) -> Option<Alu> {
    macro_rules! dot {
        ($a:ty, $b:ty) => {
            Some(|r: Regs, i: &Inst| {
                let (a, b) = ((r.get(i.a) as u32).to_le_bytes(), (r.get(i.b) as u32).to_le_bytes());
                let dot: i32 = (0..4).map(|n| i32::from(a[n] as $a) * i32::from(b[n] as $b)).sum();
                r.set(i.d, u64::from((r.get(i.c) as u32).wrapping_add(dot as u32)));
            })
        };
    }
    match m.types[..] {
        [Ty::U32, Ty::U32] => dot!(u8, u8),
        [Ty::U32, Ty::S32] => dot!(u8, i8),
        [Ty::S32, Ty::U32] => dot!(i8, u8),
        [Ty::S32, Ty::S32] => dot!(i8, i8),
        _ => None,
    }
}

fn testp(m: &Mnemonic<'_>, ty: Ty) -> Option<Selected> {
    macro_rules! test {
        (|$a:ident| $e:expr) => { plain(pick!(ty, [F32: f32, F64: f64], one!(|$a| $e)), 1) };
    }
    match *m.mods.first()? {
        "finite" => test!(|a| a.is_finite()),
        "infinite" => test!(|a| a.is_infinite()),
        "number" => test!(|a| !a.is_nan()),
        "notanumber" => test!(|a| a.is_nan()),
        "normal" => test!(|a| a.is_normal()),
        "subnormal" => test!(|a| a.is_subnormal()),
        _ => None,
    }
}

/// Arithmetic with the carry register, whose number is in `imm`.
fn carry(m: &Mnemonic<'_>, ty: Ty) -> Option<Selected> {
    m.only(&["cc", "lo", "hi"])?;
    let (takes, gives, high) = (m.base.ends_with('c'), m.has("cc"), m.has("hi"));
    macro_rules! with {
        (|$r:ident, $i:ident, $c:ident| $sum:expr) => {
            match (takes, gives) {
                (true, true) => with!(@ |$r, $i, $c| $sum, $r.get($i.imm as u16), true),
                (true, false) => with!(@ |$r, $i, $c| $sum, $r.get($i.imm as u16), false),
                _ => with!(@ |$r, $i, $c| $sum, 0, true),
            }
        };
        (@ |$r:ident, $i:ident, $c:ident| $sum:expr, $carry:expr, $gives:expr) => {
            pick!(ty.bits(), [U32: u32, U64: u64], |$r: Regs, $i: &Inst| {
                let $c = $carry as i128 & 1;
                let sum: i128 = $sum;
                $r.set($i.d, sum as T as u64);
                if $gives {
                    // A borrow shows as a negative sum: the flag is the bit above the result either way.
                    $r.set($i.imm as u16, (sum >> T::BITS) as u64 & 1);
                }
            })
        };
    }
    let (alu, sources) = match m.base {
        "add" | "addc" => (with!(|r, i, c| (r.get(i.a) as T as i128) + (r.get(i.b) as T as i128) + c), 2),
        "sub" | "subc" => (with!(|r, i, c| (r.get(i.a) as T as i128) - (r.get(i.b) as T as i128) - c), 2),
        "mad" | "madc" if high && !ty.is_signed() => (
            with!(|r, i, c| ((r.get(i.a) as T as u128 * r.get(i.b) as T as u128) >> T::BITS) as i128
                + (r.get(i.c) as T as i128)
                + c),
            3,
        ),
        "mad" | "madc" if high => return None,
        "mad" | "madc" => (
            with!(|r, i, c| ((r.get(i.a) as T).wrapping_mul(r.get(i.b) as T) as i128) + (r.get(i.c) as T as i128) + c),
            3,
        ),
        _ => return None,
    };
    Some(Selected { alu: alu?, sources, imm: 0, carry: true })
}

fn smaller<F: Float>(a: F, b: F, nan: bool) -> f64 {
    let (x, y) = (a.wide(), b.wide());
    if x.is_nan() || y.is_nan() {
        return if nan || x.is_nan() && y.is_nan() {
            f64::NAN
        } else if x.is_nan() {
            y
        } else {
            x
        };
    }
    if x < y || x == y && x.is_sign_negative() { x } else { y }
}
fn larger<F: Float>(a: F, b: F, nan: bool) -> f64 {
    let (x, y) = (a.wide(), b.wide());
    if x.is_nan() || y.is_nan() {
        return if nan || x.is_nan() && y.is_nan() {
            f64::NAN
        } else if x.is_nan() {
            y
        } else {
            x
        };
    }
    if x > y || x == y && x.is_sign_positive() { x } else { y }
}

fn float_alu(m: &Mnemonic<'_>, ty: Ty) -> Option<Selected> {
    m.only(&["rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full", "NaN"])?;
    let flags = m.flags();
    let double = |v: Option<Selected>| v.map(|s| Selected { imm: flags.0, ..s });
    // Half formats: round to nearest only.
    if matches!(ty, Ty::F16 | Ty::Bf16) {
        if flags.0 & !(NAN | FTZ) != 0 || m.has("ftz") {
            return None;
        }
        macro_rules! halves { ($op:expr) => { pick!(ty, [F16: Half, Bf16: Brain], $op) }; }
        return double(match m.base {
            "add" => plain(halves!(two!(|a, b| T::from_wide(a.wide() + b.wide()))), 2),
            "sub" => plain(halves!(two!(|a, b| T::from_wide(a.wide() - b.wide()))), 2),
            "mul" => plain(halves!(two!(|a, b| T::from_wide(a.wide() * b.wide()))), 2),
            "fma" => plain(halves!(three!(|a, b, c| T::from_wide(a.wide().mul_add(b.wide(), c.wide())))), 3),
            "min" if m.has("NaN") => plain(halves!(two!(|a, b| T::from_wide(smaller(a, b, true)))), 2),
            "max" if m.has("NaN") => plain(halves!(two!(|a, b| T::from_wide(larger(a, b, true)))), 2),
            "min" => plain(halves!(two!(|a, b| T::from_wide(smaller(a, b, false)))), 2),
            "max" => plain(halves!(two!(|a, b| T::from_wide(larger(a, b, false)))), 2),
            "neg" => plain(Some(|r, i| r.set(i.d, r.get(i.a) ^ 0x8000)), 1),
            "abs" => plain(Some(|r, i| r.set(i.d, r.get(i.a) & 0x7FFF)), 1),
            _ => None,
        });
    }
    // The usual case, round to nearest and nothing else, has operations of its own.
    if flags.0 == NEAREST {
        return match m.base {
            "add" => plain(pick!(ty, [F32: f32, F64: f64], two!(|a, b| a + b)), 2),
            "sub" => plain(pick!(ty, [F32: f32, F64: f64], two!(|a, b| a - b)), 2),
            "mul" => plain(pick!(ty, [F32: f32, F64: f64], two!(|a, b| a * b)), 2),
            "fma" | "mad" => plain(pick!(ty, [F32: f32, F64: f64], three!(|a, b, c| a.mul_add(b, c))), 3),
            "div" => plain(pick!(ty, [F32: f32, F64: f64], two!(|a, b| a / b)), 2),
            "rcp" => plain(pick!(ty, [F32: f32, F64: f64], one!(|a| 1.0 / a)), 1),
            "sqrt" => plain(pick!(ty, [F32: f32, F64: f64], one!(|a| a.sqrt())), 1),
            "min" => plain(floats!(ty, two!(|a, b| T::from_wide(smaller(a, b, false)))), 2),
            "max" => plain(floats!(ty, two!(|a, b| T::from_wide(larger(a, b, false)))), 2),
            "neg" => plain(pick!(ty, [F32: f32, F64: f64], one!(|a| -a)), 1),
            "abs" => plain(pick!(ty, [F32: f32, F64: f64], one!(|a| a.abs())), 1),
            _ => None,
        };
    }
    if ty == Ty::F64 {
        return double(directed64(m));
    }
    macro_rules! f32s {
        (|$f:ident, $a:ident| $e:expr) => {
            plain(
                Some(|r: Regs, i: &Inst| {
                    let $f = Flags(i.imm);
                    let $a = $f.input(f32::get(r.get(i.a)));
                    r.set(i.d, $f.output($e).put());
                }),
                1,
            )
        };
        (|$f:ident, $a:ident, $b:ident| $e:expr) => {
            plain(
                Some(|r: Regs, i: &Inst| {
                    let $f = Flags(i.imm);
                    let ($a, $b) = ($f.input(f32::get(r.get(i.a))), $f.input(f32::get(r.get(i.b))));
                    r.set(i.d, $f.output($e).put());
                }),
                2,
            )
        };
    }
    double(match m.base {
        "add" => f32s!(|f, a, b| sum32(f, f64::from(a), f64::from(b))),
        "sub" => f32s!(|f, a, b| sum32(f, f64::from(a), -f64::from(b))),
        "mul" => f32s!(|f, a, b| f.round32(f64::from(a) * f64::from(b), 0.0)),
        "fma" | "mad" => plain(
            Some(|r: Regs, i: &Inst| {
                let f = Flags(i.imm);
                let [a, b, c] = [i.a, i.b, i.c].map(|x| f.input(f32::get(r.get(x))));
                let v = if f.mode() == NEAREST {
                    a.mul_add(b, c)
                } else {
                    sum32(f, f64::from(a) * f64::from(b), f64::from(c))
                };
                r.set(i.d, f.output(v).put());
            }),
            3,
        ),
        "div" => f32s!(|f, a, b| if f.mode() == NEAREST { a / b } else { quotient32(f, f64::from(a), f64::from(b)) }),
        "rcp" => f32s!(|f, a| if f.mode() == NEAREST { 1.0 / a } else { quotient32(f, 1.0, f64::from(a)) }),
        "sqrt" => f32s!(|f, a| if f.mode() == NEAREST {
            a.sqrt()
        } else {
            let s = f64::from(a).sqrt();
            f.round32(s, (-s).mul_add(s, f64::from(a)))
        }),
        "min" => f32s!(|f, a, b| smaller(a, b, f.has(NAN)) as f32),
        "max" => f32s!(|f, a, b| larger(a, b, f.has(NAN)) as f32),
        "neg" => f32s!(|f, a| -a),
        "abs" => f32s!(|f, a| a.abs()),
        _ => None,
    })
}

fn sum32(f: Flags, a: f64, b: f64) -> f32 {
    let (s, e) = two_sum(a, b);
    if s == 0.0 { f.zero_sum(s, a, b) as f32 } else { f.round32(s, e) }
}

fn quotient32(f: Flags, a: f64, b: f64) -> f32 {
    let q = a / b;
    if !q.is_finite() || !b.is_finite() {
        return q as f32;
    }
    // The remainder has the sign of what is missing, once divided by b.
    f.round32(q, (-q).mul_add(b, a) * b.signum())
}

/// Double precision with a directed rounding or saturation.
fn directed64(m: &Mnemonic<'_>) -> Option<Selected> {
    fn finish(f: Flags, near: f64, error: f64, finite: bool) -> u64 {
        f.output64(f.overflow64(f.round64(near, error), finite)).to_bits()
    }
    match m.base {
        "add" | "sub" => {
            let alu: Alu = if m.base == "add" {
                |r, i| r.set(i.d, sum64(Flags(i.imm), f64::get(r.get(i.a)), f64::get(r.get(i.b))))
            } else {
                |r, i| r.set(i.d, sum64(Flags(i.imm), f64::get(r.get(i.a)), -f64::get(r.get(i.b))))
            };
            fn sum64(f: Flags, a: f64, b: f64) -> u64 {
                let (s, e) = two_sum(a, b);
                finish(f, if s == 0.0 { f.zero_sum(s, a, b) } else { s }, e, a.is_finite() && b.is_finite())
            }
            plain(Some(alu), 2)
        }
        "mul" => plain(
            Some(|r, i| {
                let (a, b) = (f64::get(r.get(i.a)), f64::get(r.get(i.b)));
                r.set(i.d, product64(Flags(i.imm), a, b));
            }),
            2,
        ),
        "fma" => plain(
            Some(|r, i| {
                let f = Flags(i.imm);
                let [a, b, c] = [i.a, i.b, i.c].map(|x| f64::get(r.get(x)));
                let near = a.mul_add(b, c);
                let (p, s);
                (p, s) = (a * b, two_sum(a * b, c));
                let missing =
                    if p.is_finite() && s.0.is_finite() { (s.0 - near) + (s.1 + a.mul_add(b, -p)) } else { 0.0 };
                let near = if near == 0.0 && missing == 0.0 { f.zero_sum(near, p, c) } else { near };
                r.set(i.d, finish(f, near, missing, a.is_finite() && b.is_finite() && c.is_finite()));
            }),
            3,
        ),
        "div" | "rcp" => {
            fn quotient(f: Flags, a: f64, b: f64) -> u64 {
                let q = a / b;
                let (qs, bs, as_) = scaled(q, b, a);
                finish(f, q, (-qs).mul_add(bs, as_) * b.signum(), b != 0.0 && a.is_finite() && b.is_finite())
            }
            if m.base == "div" {
                plain(Some(|r, i| r.set(i.d, quotient(Flags(i.imm), f64::get(r.get(i.a)), f64::get(r.get(i.b))))), 2)
            } else {
                plain(Some(|r, i| r.set(i.d, quotient(Flags(i.imm), 1.0, f64::get(r.get(i.a))))), 1)
            }
        }
        "sqrt" => plain(
            Some(|r, i| {
                let a = f64::get(r.get(i.a));
                let s = a.sqrt();
                let scale = if a < 1e-200 { 2f64.powi(270) } else { 1.0 };
                let missing = if s.is_finite() { (-s * scale).mul_add(s * scale, a * scale * scale) } else { 0.0 };
                r.set(i.d, finish(Flags(i.imm), s, missing, false));
            }),
            1,
        ),
        _ => None,
    }
}

/// q, b and a of a division, scaled alike so that the remainder a - q*b does not underflow.
fn scaled(q: f64, b: f64, a: f64) -> (f64, f64, f64) {
    let big = 2f64.powi(600);
    if a.abs() < 1e-250 { if b.abs() < 1.0 { (q, b * big, a * big) } else { (q * big, b, a * big) } } else { (q, b, a) }
}

fn product64(f: Flags, a: f64, b: f64) -> u64 {
    let p = a * b;
    let missing = if p.is_finite() {
        // Tiny products: the error itself would underflow, so it is taken of scaled operands.
        let big = 2f64.powi(540);
        if p.abs() < 1e-250 && a != 0.0 && b != 0.0 {
            let (a, b) = if a.abs() < b.abs() { (a * big, b) } else { (a, b * big) };
            if p == 0.0 { a * b } else { a.mul_add(b, -(p * big)) }
        } else {
            a.mul_add(b, -p)
        }
    } else {
        0.0
    };
    let near = if p == 0.0 && missing != 0.0 { 0f64.copysign(missing) } else { p };
    f.output64(f.overflow64(f.round64(near, missing), a.is_finite() && b.is_finite())).to_bits()
}

fn approximate(m: &Mnemonic<'_>) -> Option<Selected> {
    m.only(&["approx", "ftz"])?;
    macro_rules! of {
        (|$a:ident| $e:expr) => {
            Some(
                (|r: Regs, i: &Inst| {
                    let f = Flags(i.imm);
                    let $a = f64::from(f.input(f32::get(r.get(i.a))));
                    r.set(i.d, f.output($e as f32).put());
                }) as Alu,
            )
        };
    }
    let alu = match m.base {
        "rsqrt" => of!(|a| 1.0 / a.sqrt()),
        "ex2" => of!(|a| a.exp2()),
        "lg2" => of!(|a| a.log2()),
        "sin" => of!(|a| a.sin()),
        "cos" => of!(|a| a.cos()),
        _ => of!(|a| a.tanh()),
    };
    plain(alu, 1).map(|s| Selected { imm: m.flags().0, ..s })
}

/// The comparison of `setp` and `set` for operands of type `ty`.
pub fn compare(name: &str, ty: Ty, ftz: bool) -> Option<Alu> {
    macro_rules! cmp {
        ($ints:ident, |$a:ident, $b:ident| $e:expr) => {
            if ty == Ty::F32 && ftz {
                type T = f32;
                Some(|r: Regs, i: &Inst| {
                    let f = Flags(FTZ);
                    let ($a, $b) = (f.input(T::get(r.get(i.a))), f.input(T::get(r.get(i.b))));
                    r.set(i.d, u64::from($e));
                })
            } else if ty.is_float() {
                floats!(ty, two!(|$a, $b| $e))
            } else {
                cmp!(@ $ints, |$a, $b| $e)
            }
        };
        (@ any, |$a:ident, $b:ident| $e:expr) => { ints!(ty, two!(|$a, $b| $e)) };
        (@ floats, |$a:ident, $b:ident| $e:expr) => { None };
    }
    // Not `<`, `<=`: the unordered forms must hold for NaN.
    match name {
        "eq" if ty == Ty::Pred => None,
        "eq" => cmp!(any, |a, b| a == b),
        "ne" => {
            if ty.is_float() {
                cmp!(floats, |a, b| a.partial_cmp(&b).is_some_and(|o| o.is_ne()))
            } else {
                cmp!(any, |a, b| a != b)
            }
        }
        "lt" => cmp!(any, |a, b| a < b),
        "le" => cmp!(any, |a, b| a <= b),
        "gt" => cmp!(any, |a, b| a > b),
        "ge" => cmp!(any, |a, b| a >= b),
        "lo" => ints!(ty.bits(), two!(|a, b| a < b)),
        "ls" => ints!(ty.bits(), two!(|a, b| a <= b)),
        "hi" => ints!(ty.bits(), two!(|a, b| a > b)),
        "hs" => ints!(ty.bits(), two!(|a, b| a >= b)),
        "equ" => cmp!(floats, |a, b| a.partial_cmp(&b).is_none_or(|o| o.is_eq())),
        "neu" => cmp!(floats, |a, b| a != b),
        "ltu" => cmp!(floats, |a, b| !a.partial_cmp(&b).is_some_and(|o| o.is_ge())),
        "leu" => cmp!(floats, |a, b| !a.partial_cmp(&b).is_some_and(|o| o.is_gt())),
        "gtu" => cmp!(floats, |a, b| !a.partial_cmp(&b).is_some_and(|o| o.is_le())),
        "geu" => cmp!(floats, |a, b| !a.partial_cmp(&b).is_some_and(|o| o.is_lt())),
        "num" => cmp!(floats, |a, b| a.partial_cmp(&b).is_some()),
        "nan" => cmp!(floats, |a, b| a.partial_cmp(&b).is_none()),
        _ => None,
    }
}

/// The steps of a conversion, each reading its source from `a`; `imm` is the same for all.
pub fn convert(m: &Mnemonic<'_>) -> Option<(Vec<Alu>, i32)> {
    let [to, from] = m.types[..] else { return None };
    m.only(&["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat"])?;
    let flags = m.flags();
    macro_rules! all_ints {
        ($ty:expr, $op:expr) => {
            pick!($ty, [U8: u8, U16: u16, U32: u32, U64: u64, S8: i8, S16: i16, S32: i32, S64: i64], $op)
        };
    }
    let steps = match (from.is_float(), to.is_float()) {
        (false, false) => {
            let mut steps = vec![all_ints!(from, one!(|a| a))?];
            if flags.has(SAT) {
                steps.push(if from.is_signed() {
                    all_ints!(to, |r: Regs, i: &Inst| r
                        .set(i.d, (r.get(i.a) as i64 as i128).clamp(T::MIN as i128, T::MAX as i128) as u64))?
                } else {
                    all_ints!(to, |r: Regs, i: &Inst| r.set(i.d, r.get(i.a).min(T::MAX as u64)))?
                });
            }
            steps.push(all_ints!(to, one!(|a| a))?);
            steps
        }
        (false, true) => match to {
            Ty::F32 => vec![all_ints!(from, |r: Regs, i: &Inst| {
                let (v, f) = (T::get(r.get(i.a)), Flags(i.imm));
                let near = v as f64;
                let out =
                    if f.mode() == NEAREST { v as f32 } else { f.round32(near, (v as i128 - near as i128) as f64) };
                r.set(i.d, f.output(out).put());
            })?],
            Ty::F64 => vec![all_ints!(from, |r: Regs, i: &Inst| {
                let v = T::get(r.get(i.a));
                let near = v as f64;
                r.set(i.d, Flags(i.imm).round64(near, (v as i128 - near as i128) as f64).put());
            })?],
            _ => vec![
                all_ints!(from, |r: Regs, i: &Inst| r.set(i.d, (T::get(r.get(i.a)) as f64).put()))?,
                store_float(to)?,
            ],
        },
        (true, false) => vec![widen(from)?, {
            // An invalid input gives zero from single to 32 bits, and the highest bit alone otherwise.
            if from == Ty::F64 || to.bytes() == 8 {
                all_ints!(to, |r: Regs, i: &Inst| {
                    let v = f64::get(r.get(i.a));
                    r.set(
                        i.d,
                        if v.is_nan() { (1u64 << (T::BITS - 1)) as T } else { Flags(i.imm).integral(v) as T }.put(),
                    );
                })?
            } else {
                all_ints!(to, |r: Regs, i: &Inst| r.set(i.d, (Flags(i.imm).integral(f64::get(r.get(i.a))) as T).put()))?
            }
        }],
        (true, true) => vec![widen(from)?, store_float(to)?],
    };
    Some((steps, flags.0))
}

/// A float of any format as a double.
fn widen(from: Ty) -> Option<Alu> {
    match from {
        Ty::F32 => Some(|r, i| r.set(i.d, f64::from(Flags(i.imm).input(f32::get(r.get(i.a)))).to_bits())),
        _ => floats!(from, |r: Regs, i: &Inst| r.set(i.d, T::get(r.get(i.a)).wide().to_bits())),
    }
}

/// A double as a float of format `to`.
fn store_float(to: Ty) -> Option<Alu> {
    fn value(r: Regs, i: &Inst) -> (f64, Flags) {
        let (v, f) = (f64::get(r.get(i.a)), Flags(i.imm));
        (if f.has(INTEGRAL) { f.integral(v) } else { v }, f)
    }
    Some(match to {
        Ty::F32 => |r, i| {
            let (v, f) = value(r, i);
            r.set(i.d, f.output(f.round32(v, 0.0)).put());
        },
        Ty::F64 => |r, i| {
            let (v, f) = value(r, i);
            r.set(i.d, f.output64(v).put());
        },
        Ty::F16 => |r, i| {
            let (v, f) = value(r, i);
            r.set(i.d, u64::from(to_f16(f.output64(v), f)));
        },
        Ty::Bf16 => |r, i| {
            let (v, f) = value(r, i);
            r.set(i.d, u64::from(to_bf16(f.output64(v), f)));
        },
        _ => return None,
    })
}
