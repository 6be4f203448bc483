//! The simulation on one or more devices.

use std::ffi::c_void;
use std::ptr;

use anyhow::Result;

use crate::bodies::{DAMPING, Real, SOFTENING, State, TIME_STEP};
use crate::device::{Device, Event, Memory};

/// Threads of a block; the number of bodies is a multiple of it.
pub const BLOCK: usize = 256;

/// The bodies that one device moves. It reads the positions of all.
struct Part<T> {
    // Before `device`: memory goes back while the context is still there.
    positions: [Memory<[T; 4]>; 2],
    velocities: Memory<[T; 4]>,
    device: Device,
    first: usize,
    count: usize,
}

pub struct Simulation<T> {
    parts: Vec<Part<T>>,
    bodies: usize,
    /// Which of the two position buffers holds the present.
    now: usize,
    /// Where the devices' new positions meet.
    exchange: Vec<[T; 4]>,
}

impl<T: Real> Simulation<T> {
    /// Spreads the bodies over the devices in whole blocks.
    pub fn new(ordinals: &[usize], state: &State<T>) -> Result<Self> {
        let bodies = state.positions.len();
        let blocks = bodies / BLOCK;
        let mut parts = Vec::new();
        for (index, &ordinal) in ordinals.iter().enumerate() {
            let first = blocks * index / ordinals.len() * BLOCK;
            let end = blocks * (index + 1) / ordinals.len() * BLOCK;
            let device = Device::open(ordinal, T::KERNEL)?;
            let part = Part {
                positions: [Memory::new(&device, bodies)?, Memory::new(&device, bodies)?],
                velocities: Memory::new(&device, bodies)?,
                device,
                first,
                count: end - first,
            };
            part.positions[0].write(0, &state.positions)?;
            part.velocities.write(0, &state.velocities)?;
            parts.push(part);
        }
        Ok(Self {
            parts,
            bodies,
            now: 0,
            exchange: vec![[T::default(); 4]; bodies],
        })
    }

    pub fn bodies(&self) -> usize {
        self.bodies
    }

    /// Moves all bodies by one step. With one device this only queues the work.
    pub fn step(&mut self) -> Result<()> {
        for part in self.parts.iter().filter(|part| part.count > 0) {
            part.launch(self.now, self.bodies)?;
        }
        self.now = 1 - self.now;
        if self.parts.len() > 1 {
            self.exchange_positions()?;
        }
        Ok(())
    }

    /// Takes `steps` steps; the milliseconds from before the first to after the last on the first device's clock.
    pub fn timed_steps(&mut self, steps: usize) -> Result<f32> {
        let start = Event::record(&self.parts[0].device)?;
        for _ in 0..steps {
            self.step()?;
        }
        let end = Event::record(&self.parts[0].device)?;
        end.milliseconds_since(&start)
    }

    /// The present positions and velocities.
    pub fn state(&self) -> Result<State<T>> {
        let blank = || vec![[T::default(); 4]; self.bodies];
        let mut state = State {
            positions: blank(),
            velocities: blank(),
        };
        for part in &self.parts {
            let own = part.first..part.first + part.count;
            part.device.synchronize()?;
            part.positions[self.now].read(part.first, &mut state.positions[own.clone()])?;
            part.velocities
                .read(part.first, &mut state.velocities[own])?;
        }
        Ok(state)
    }

    /// Gives every device the positions that the others computed, by way of the host.
    fn exchange_positions(&mut self) -> Result<()> {
        for part in &self.parts {
            let own = part.first..part.first + part.count;
            part.positions[self.now].read(part.first, &mut self.exchange[own])?;
        }
        for part in &self.parts {
            let end = part.first + part.count;
            part.positions[self.now].write(0, &self.exchange[..part.first])?;
            part.positions[self.now].write(end, &self.exchange[end..])?;
        }
        Ok(())
    }
}

impl<T: Real> Part<T> {
    /// Queues the step of this part's bodies from position buffer `now` to the other.
    fn launch(&self, now: usize, bodies: usize) -> Result<()> {
        let mut positions = self.positions[now].address;
        let mut next_positions = self.positions[1 - now].address;
        let mut velocities = self.velocities.address;
        let (mut first, mut bodies) = (u32::try_from(self.first)?, u32::try_from(bodies)?);
        let (mut time_step, mut damping) = (T::from_f64(TIME_STEP), T::from_f64(DAMPING));
        let mut softening_squared = T::from_f64(SOFTENING * SOFTENING);
        let mut parameters = [
            pointer(&mut positions),
            pointer(&mut next_positions),
            pointer(&mut velocities),
            pointer(&mut first),
            pointer(&mut bodies),
            pointer(&mut time_step),
            pointer(&mut damping),
            pointer(&mut softening_squared),
        ];
        self.device.enter()?;
        // SAFETY: the eight values are those of nbody.cu, with T the precision of the kernel that `device` loaded.
        // The three buffers hold `bodies` bodies and the blocks cover `first..first + count` of them.
        unsafe {
            self.device.launch(
                self.count / BLOCK,
                BLOCK,
                BLOCK * size_of::<[T; 4]>(),
                &mut parameters,
            )
        }
    }
}

fn pointer<V>(value: &mut V) -> *mut c_void {
    ptr::from_mut(value).cast()
}
