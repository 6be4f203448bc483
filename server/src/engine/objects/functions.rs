//! Functions and variables of a session's images.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::devices::volume;
use crate::engine::images::instances::Key;
use crate::engine::objects::pace::Length;
use mpsshim_api::cuda::CUfunction;
use mpsshim_proto::message::Launch;
use std::cell::Cell;

/// A function of a session: in a module, or of a library's kernel on a device.
#[derive(Debug)]
pub struct Function {
    /// The driver's function, loaded in the device's context.
    pub raw: CUfunction,
    /// Whether `raw` has exactly the attributes that the session has set, so that it can be launched.
    pub taken: bool,
    /// Whether it was launched, queried, or named by a graph.
    pub asked: bool,
    /// Its name and device.
    pub key: Key,
    /// Bytes its parameters take when packed.
    pub param_bytes: u32,
    /// Handle of the module or library that contains it and with which it is destroyed.
    pub image: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Launching it may print (see [`crate::engine::images::instances::Image::prints`]).
    pub prints: bool,
    /// Whether a launch may write variables of its image, whose content must be restored in the next server.
    pub keeps: bool,
    /// Whether it was launched since variables were last saved.
    pub launched: Cell<bool>,
    /// Whether it may be launched in a batch with others.
    pub in_runs: bool,
    /// How long it takes, as last measured.
    pub length: Length,
    /// Bytes of local memory per thread.
    pub local: u32,
    /// The latest shape of a block, and the part of the device that such a block takes.
    pub block: Cell<BlockPart>,
    /// Number of the latest trace that has its name, and the name's number there.
    pub traced: (u32, u32),
}

/// The part of a device that a block takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockPart {
    /// Threads of the block, by dimension.
    block: [u32; 3],
    /// Bytes of its dynamic shared memory.
    shared: u32,
    part: f32,
}

impl Function {
    /// Part of the device that a launch of this shape can fill; more than 1 for several waves of blocks. The device's
    /// context must be current.
    #[inline]
    pub fn fills(&self, gpu: &Gpu, launch: &Launch) -> f32 {
        let (block, shared) = (launch.block, launch.shared);
        let mut known = self.block.get();
        if (known.block, known.shared) != (block, shared) {
            let device = &gpu.devices[self.device];
            let part = device.part_of_block(&gpu.driver, self.raw, block, shared);
            known = BlockPart {
                block,
                shared,
                part,
            };
            self.block.set(known);
        }
        volume(launch.grid) as f32 * known.part
    }
}

/// A variable in a module of a session.
#[derive(Debug)]
pub struct Global {
    /// Bytes.
    pub len: u64,
    /// Handle of the module or library that contains it and with which it is destroyed.
    pub image: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Whether it was used by address since variables were last saved.
    pub used: Cell<bool>,
}
