//! Validation of launch attributes as the driver does it, before the launch is sent, so that the launch itself returns
//! the error.

use mpsshim_api::cuda::*;

use super::launch::Shape;
use super::occupancy;
use crate::ffi::Status;
use crate::proxy::context;
use crate::proxy::event::{self, EventRef};
use crate::proxy::module::FunctionRef;

/// Blocks that a cluster may have on any device with clusters.
const PORTABLE_CLUSTER: u64 = 8;
/// Blocks that a cluster may have where a kernel allows more.
const LARGEST_CLUSTER: u64 = 16;

/// Device attributes (cuda.h).
const MAX_ACCESS_POLICY_WINDOW_SIZE: u32 = 109;
const MEM_SYNC_DOMAIN_COUNT: u32 = 126;

/// Events that a launch records.
pub type Recorded = [Option<EventRef>; 2];

/// One attribute as it travels.
struct Attribute<'a>(&'a [u8]);

impl Attribute<'_> {
    fn id(&self) -> u32 {
        self.word(0)
    }
    fn word(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.0[at..at + 4]);
        u32::from_ne_bytes(word)
    }
    /// Word `index` of the value.
    fn value(&self, index: usize) -> u32 {
        self.word(8 + 4 * index)
    }
    fn long(&self, index: usize) -> u64 {
        self.value(index) as u64 | (self.value(index + 1) as u64) << 32
    }
}

/// Checks the attributes of a launch; returns the events that it records.
pub fn check(function: FunctionRef, shape: &Shape, attributes: &[u8]) -> Status<Recorded> {
    let mut recorded = Recorded::default();
    let (mut cluster, mut is_cooperative) = (None, false);
    let invalid = Err(CUDA_ERROR_INVALID_VALUE);
    let device = function.context().device;
    let limit = |attribute: u32, otherwise: i32| {
        context::device_attribute(device, attribute).unwrap_or(otherwise) as u64
    };
    for attribute in attributes.chunks_exact(size_of::<CUlaunchAttribute>()) {
        let attribute = Attribute(attribute);
        let value = attribute.value(0);
        match attribute.id() {
            CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW => {
                let ratio = f32::from_bits(attribute.value(4));
                let most = limit(MAX_ACCESS_POLICY_WINDOW_SIZE, i32::MAX);
                if !(0.0..=1.0).contains(&ratio) || attribute.long(2) > most {
                    return invalid;
                }
            }
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => is_cooperative = value != 0,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                cluster = Some([0, 1, 2].map(|index| attribute.value(index)));
            }
            CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE if value > 2 => {
                return invalid;
            }
            CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN if value > 1 => return invalid,
            CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP => {
                let most = limit(MEM_SYNC_DOMAIN_COUNT, 256).max(1);
                let (normal, remote) = (value & 0xff, value >> 8 & 0xff);
                if normal.max(remote) as u64 >= most {
                    return invalid;
                }
            }
            CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT if value > 100 => return invalid,
            CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY => return invalid,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT => {
                recorded[0] = Some(records(&attribute)?);
            }
            CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT => {
                recorded[1] = Some(records(&attribute)?);
            }
            CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE => {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            15 | CU_LAUNCH_ATTRIBUTE_MAX.. => return invalid,
            _ => {}
        }
    }
    check_cluster(function, shape, cluster)?;
    if is_cooperative && cluster.is_none() {
        check_cooperative(function, shape)?;
    }
    Ok(recorded)
}

/// The event that an attribute names.
fn records(attribute: &Attribute<'_>) -> Status<EventRef> {
    let event = event::resolve(attribute.long(0))?;
    if event.flags() & CU_EVENT_DISABLE_TIMING == 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if attribute.value(2) != 0 {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    Ok(event)
}

/// Clusters divide the grid, are not too large, and are those that the kernel was compiled for, if it was for some.
#[inline]
pub fn check_cluster(function: FunctionRef, shape: &Shape, given: Option<[u32; 3]>) -> Status {
    let known = |attribute: u32| function.known(attribute).unwrap_or(0) as u32;
    let width = known(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH);
    let cluster = match given {
        None if width == 0 => return Ok(()),
        None => [
            width,
            known(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT).max(1),
            known(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH).max(1),
        ],
        Some(given) => {
            let required = [
                width,
                known(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT),
                known(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH),
            ];
            if width != 0 && required != given {
                return Err(CUDA_ERROR_INVALID_CLUSTER_SIZE);
            }
            given
        }
    };
    let most = if known(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) != 0 {
        LARGEST_CLUSTER
    } else {
        PORTABLE_CLUSTER
    };
    let blocks = cluster.iter().map(|side| *side as u64).product::<u64>();
    let divides = |(grid, side): (&u32, &u32)| *side != 0 && grid.is_multiple_of(*side);
    if blocks > most || !shape.grid.iter().zip(&cluster).all(divides) {
        return Err(CUDA_ERROR_INVALID_CLUSTER_SIZE);
    }
    Ok(())
}

/// All blocks of a cooperative launch must be resident at once.
fn check_cooperative(function: FunctionRef, shape: &Shape) -> Status {
    let threads = shape.block.iter().product::<u32>();
    let one = occupancy::request(
        function,
        occupancy::MAX_BLOCKS,
        threads as i32,
        shape.shared.into(),
        0,
    )?;
    let count = context::multiprocessors(function.context());
    let fitting = one * count.unwrap_or(1) as u64;
    let blocks = shape.grid.iter().map(|side| *side as u64).product::<u64>();
    if blocks > fitting {
        return Err(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(())
}
