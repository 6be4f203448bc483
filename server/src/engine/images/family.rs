//! The name under which images are shared and loaded ahead.

use crate::engine::base::jit::JitOptions;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::Side;
use crate::engine::gpu::cubin;
use crate::engine::gpu::devices::Devices;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::ImageLoad;

/// Identifies identical contents loaded with identical options.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Family {
    /// SHA-256 of the content.
    pub hash: [u8; 32],
    /// The device of a module, `None` for a library.
    pub device: Option<Ordinal>,
    /// Side that it is loaded on.
    pub side: Side,
    /// Options, as encoded in the message.
    pub options: Vec<u8>,
}

impl Family {
    /// The family of a load on a device and side with these encoded options; `None` if it requests logs, because logs belong
    /// to a single load.
    pub fn of(body: &ImageLoad, device: Ordinal, side: Side, options: &[u8]) -> Option<Family> {
        let asks = body.info_log != 0 || body.error_log != 0;
        (!asks && body.options < 0x100).then(|| Family {
            hash: body.hash,
            device: match Handle(body.image).kind() {
                Some(Kind::Library) => None,
                _ => Some(device),
            },
            side,
            options: [&[body.options as u8][..], options].concat(),
        })
    }

    /// The options of its loads; `None` if they cannot be read.
    pub fn jit_options(&self) -> Option<JitOptions> {
        let (count, options) = self.options.split_first()?;
        let (mut options, _) = JitOptions::read(options, u32::from(*count)).ok()?;
        options.want(0, 0);
        Some(options)
    }

    /// Whether the kernels of its content, without the NUL, keep no state between launches on any of these devices that it
    /// may be loaded on.
    pub fn keeps_nothing(&self, devices: &Devices, content: &[u8]) -> bool {
        devices.iter().all(|device| {
            let other = self.device.is_some_and(|of| of != device.ordinal);
            other || cubin::keeps_nothing(content, device.capability)
        })
    }
}
