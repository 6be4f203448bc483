//! Bodies, where they start, and the step on the CPU that `-compare` measures the GPU against.

use std::thread;

/// Simulated time of one step.
pub const TIME_STEP: f64 = 0.01;
/// Each step keeps this share of the velocity.
pub const DAMPING: f64 = 0.995;
/// Distance below which gravity no longer grows.
pub const SOFTENING: f64 = 0.05;

/// The two precisions of the kernels.
pub trait Real: Copy + Default + Send + Sync + 'static {
    /// The kernel of this precision in nbody.ptx.
    const KERNEL: &'static str;
    const PRECISION: &'static str;
    /// Flops that one interaction is counted as, by the convention of NVIDIA's sample.
    const FLOPS: u32;
    /// Largest difference of a coordinate or velocity that one step may bring, with both of the order of 1: some
    /// hundred roundings. A force that is wrong by a thousandth of itself is caught.
    const TOLERANCE: f64;
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    const KERNEL: &'static str = "nbody_step_f32";
    const PRECISION: &'static str = "Single";
    const FLOPS: u32 = 20;
    const TOLERANCE: f64 = 1e-5;
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    const KERNEL: &'static str = "nbody_step_f64";
    const PRECISION: &'static str = "Double";
    const FLOPS: u32 = 30;
    const TOLERANCE: f64 = 1e-13;
    fn from_f64(value: f64) -> Self {
        value
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// Positions with the mass as fourth number, and velocities with an unused fourth number.
pub struct State<T> {
    pub positions: Vec<[T; 4]>,
    pub velocities: Vec<[T; 4]>,
}

impl<T: Real> State<T> {
    /// `count` bodies of total mass 1, evenly in a ball of radius 1 that turns about its z axis. Always the same.
    pub fn ball(count: usize) -> Self {
        let mut random = Random(0x6d70_7373_6869_6d00);
        let mass = 1.0 / count as f64;
        let (mut positions, mut velocities) =
            (Vec::with_capacity(count), Vec::with_capacity(count));
        while positions.len() < count {
            let [x, y, z] = [random.next(), random.next(), random.next()];
            if x * x + y * y + z * z <= 1.0 {
                positions.push([x, y, z, mass].map(T::from_f64));
                velocities.push([-0.5 * y, 0.5 * x, 0.0, 0.0].map(T::from_f64));
            }
        }
        Self {
            positions,
            velocities,
        }
    }

    pub fn widen(&self) -> State<f64> {
        let widen = |bodies: &[[T; 4]]| bodies.iter().map(|body| body.map(T::to_f64)).collect();
        State {
            positions: widen(&self.positions),
            velocities: widen(&self.velocities),
        }
    }
}

impl State<f64> {
    /// The largest difference of any coordinate or velocity; infinite if one is not a number.
    pub fn difference(&self, other: &Self) -> f64 {
        let pairs = self.positions.iter().zip(&other.positions);
        let pairs = pairs.chain(self.velocities.iter().zip(&other.velocities));
        pairs
            .flat_map(|(a, b)| (0..3).map(|axis| (a[axis] - b[axis]).abs()))
            .fold(0.0, |most, next| {
                if next.is_nan() {
                    f64::INFINITY
                } else {
                    most.max(next)
                }
            })
    }
}

/// One step in double precision, with the constants rounded as precision `T` rounds them.
pub fn reference_step<T: Real>(state: &mut State<f64>) {
    let round = |value| T::from_f64(value).to_f64();
    let (time_step, damping) = (round(TIME_STEP), round(DAMPING));
    let softening_squared = round(SOFTENING * SOFTENING);
    let before = &state.positions;
    let mut after = before.clone();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let share = before.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (positions, velocities) in after
            .chunks_mut(share)
            .zip(state.velocities.chunks_mut(share))
        {
            scope.spawn(move || {
                for (position, velocity) in positions.iter_mut().zip(velocities) {
                    let pull = acceleration(position, before, softening_squared);
                    for axis in 0..3 {
                        velocity[axis] = (velocity[axis] + pull[axis] * time_step) * damping;
                        position[axis] += velocity[axis] * time_step;
                    }
                }
            });
        }
    });
    state.positions = after;
}

fn acceleration(here: &[f64; 4], others: &[[f64; 4]], softening_squared: f64) -> [f64; 3] {
    let mut sum = [0.0; 3];
    for other in others {
        let d = [other[0] - here[0], other[1] - here[1], other[2] - here[2]];
        let square = softening_squared + d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
        let pull = other[3] / (square * square.sqrt());
        for axis in 0..3 {
            sum[axis] += d[axis] * pull;
        }
    }
    sum
}

/// splitmix64.
struct Random(u64);

impl Random {
    /// The next number from -1 to 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ball_is_always_the_same_and_has_mass_one() {
        let (one, two) = (State::<f64>::ball(512), State::<f64>::ball(512));
        assert_eq!(one.difference(&two), 0.0);
        let mass: f64 = one.positions.iter().map(|body| body[3]).sum();
        assert!((mass - 1.0).abs() < 1e-12);
        assert!(
            one.positions
                .iter()
                .all(|p| p[0] * p[0] + p[1] * p[1] + p[2] * p[2] <= 1.0)
        );
    }

    #[test]
    fn two_bodies_pull_each_other_alike() {
        let mut state = State::<f64> {
            positions: vec![[0.0, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.5]],
            velocities: vec![[0.0; 4]; 2],
        };
        reference_step::<f64>(&mut state);
        let expected = 0.5 / (1.0 + SOFTENING * SOFTENING).powf(1.5) * TIME_STEP * DAMPING;
        assert!((state.velocities[0][0] - expected).abs() < 1e-15);
        assert_eq!(state.velocities[0][0], -state.velocities[1][0]);
        assert_eq!(state.velocities[0][1], 0.0);
    }

    #[test]
    fn a_wrong_force_exceeds_the_tolerance() {
        let start = State::<f32>::ball(256).widen();
        let clone = || State {
            positions: start.positions.clone(),
            velocities: start.velocities.clone(),
        };
        let (mut right, mut wrong) = (clone(), clone());
        wrong.positions[7][3] *= 1.1;
        reference_step::<f32>(&mut right);
        reference_step::<f32>(&mut wrong);
        assert!(right.difference(&wrong) > f32::TOLERANCE);
        wrong.velocities[3][1] = f64::NAN;
        assert_eq!(right.difference(&wrong), f64::INFINITY);
    }
}
