//! Rounding as PTX names it, and the 16-bit floating-point formats.

/// The modifiers of one floating-point instruction, packed into its `imm`.
#[derive(Clone, Copy)]
pub struct Flags(pub i32);

pub const NEAREST: i32 = 0;
pub const ZERO: i32 = 1;
pub const DOWN: i32 = 2;
pub const UP: i32 = 3;
pub const FTZ: i32 = 4;
pub const SAT: i32 = 8;
pub const NAN: i32 = 16;
pub const INTEGRAL: i32 = 32;

impl Flags {
    pub fn mode(self) -> i32 {
        self.0 & 3
    }
    pub fn has(self, flag: i32) -> bool {
        self.0 & flag != 0
    }
    /// A single-precision source, subnormals flushed if the instruction says so.
    #[inline(always)]
    pub fn input(self, v: f32) -> f32 {
        if self.has(FTZ) && v.is_subnormal() { 0f32.copysign(v) } else { v }
    }
    /// A single-precision result: saturated to [0, 1] and flushed if the instruction says so.
    #[inline(always)]
    pub fn output(self, v: f32) -> f32 {
        let v = if self.has(SAT) {
            // NaN becomes +0.
            if v > 0.0 { v.min(1.0) } else { 0.0 }
        } else {
            v
        };
        self.input(v)
    }
    pub fn output64(self, v: f64) -> f64 {
        if self.has(SAT) { if v > 0.0 { v.min(1.0) } else { 0.0 } } else { v }
    }
    /// `near` + `error` (exactly) rounded to single precision. `near` must be within one unit of the last
    /// place of a double.
    pub fn round32(self, near: f64, error: f64) -> f32 {
        let r = near as f32;
        if !near.is_finite() {
            return r;
        }
        if r.is_infinite() {
            let stays = match self.mode() {
                NEAREST => true,
                ZERO => false,
                DOWN => r < 0.0,
                _ => r > 0.0,
            };
            return if stays { r } else { f32::MAX.copysign(r) };
        }
        let missing = (near - f64::from(r)) + error;
        match self.mode() {
            DOWN if missing < 0.0 => r.next_down(),
            UP if missing > 0.0 => r.next_up(),
            ZERO if missing < 0.0 && near > 0.0 => r.next_down(),
            ZERO if missing > 0.0 && near < 0.0 => r.next_up(),
            _ => r,
        }
    }
    /// `near`, the nearest double to `near` + `error`, rounded the instruction's way.
    pub fn round64(self, near: f64, error: f64) -> f64 {
        if near.is_infinite() || near.is_nan() || error == 0.0 || error.is_nan() {
            return near;
        }
        match self.mode() {
            DOWN if error < 0.0 => near.next_down(),
            UP if error > 0.0 => near.next_up(),
            ZERO if error < 0.0 && near > 0.0 => near.next_down(),
            ZERO if error > 0.0 && near < 0.0 => near.next_up(),
            _ => near,
        }
    }
    /// An infinity that arose from finite operands, as the rounding mode has it.
    pub fn overflow64(self, v: f64, finite_operands: bool) -> f64 {
        let stays = match self.mode() {
            NEAREST => true,
            ZERO => false,
            DOWN => v < 0.0,
            _ => v > 0.0,
        };
        if v.is_infinite() && finite_operands && !stays { f64::MAX.copysign(v) } else { v }
    }
    /// To an integral value.
    pub fn integral(self, v: f64) -> f64 {
        match self.mode() {
            NEAREST => v.round_ties_even(),
            ZERO => v.trunc(),
            DOWN => v.floor(),
            _ => v.ceil(),
        }
    }
    /// The sign of a zero that is the exact sum of two non-zero or opposite zero terms.
    pub fn zero_sum(self, v: f64, a: f64, b: f64) -> f64 {
        if v == 0.0 && self.mode() == DOWN && !(a == 0.0 && b == 0.0 && a.is_sign_positive() && b.is_sign_positive()) {
            -0.0
        } else {
            v
        }
    }
}

/// a + b as (nearest, what is missing).
pub fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    let t = s - a;
    (s, (a - (s - t)) + (b - t))
}

/// Rounds to a format of `mantissa` stored bits whose smallest normal is 2^`low` and whose exponents end
/// below 2^`high`; the result is still a double.
fn narrow(v: f64, mantissa: i32, low: i32, high: i32, flags: Flags) -> f64 {
    if v == 0.0 || !v.is_finite() {
        return v;
    }
    let exponent = (((v.to_bits() >> 52) & 0x7FF) as i32 - 1023).max(low);
    let quantum = 2f64.powi(exponent - mantissa);
    let r = flags.integral(v / quantum) * quantum;
    if r.abs() < 2f64.powi(high) {
        return r;
    }
    let max = 2f64.powi(high) - 2f64.powi(high - 1 - mantissa);
    match flags.mode() {
        ZERO => max.copysign(v),
        DOWN if v > 0.0 => max,
        UP if v < 0.0 => -max,
        _ => f64::INFINITY.copysign(v),
    }
}

/// The bits of `v` as a binary16.
pub fn to_f16(v: f64, flags: Flags) -> u16 {
    if v.is_nan() {
        return 0x7FFF;
    }
    let sign = if v.is_sign_negative() { 0x8000 } else { 0 };
    let r = narrow(v, 10, -14, 16, flags).abs();
    let bits = if r.is_infinite() {
        0x7C00
    } else if r < 2f64.powi(-14) {
        (r * 2f64.powi(24)) as u16
    } else {
        let bits = r.to_bits();
        ((((bits >> 52) as i32 - 1023 + 15) as u16) << 10) | ((bits >> 42) & 0x3FF) as u16
    };
    sign | bits
}

pub fn from_f16(bits: u16) -> f32 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3FF));
    sign * match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        e => (1024.0 + mantissa) * 2f32.powi(e - 25),
    }
}

/// The bits of `v` as a bfloat16.
pub fn to_bf16(v: f64, flags: Flags) -> u16 {
    if v.is_nan() {
        return 0x7FFF;
    }
    ((narrow(v, 7, -126, 128, flags) as f32).to_bits() >> 16) as u16
}

pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
