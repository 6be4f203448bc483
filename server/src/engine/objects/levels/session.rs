//! How much of a device the kernels of a session can fill, and their progress.

use super::Level;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::Side;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::reserve::Extent;
use crate::engine::session::Session;
use mpsshim_api::cuda::{CUresult, CUstream};
use mpsshim_proto::handshake::MAX_DEVICES;
use std::time::Duration;

/// The session's level on a device.
#[inline]
pub fn level(session: &Session, device: Ordinal) -> Level {
    session.shared.standing.level(device)
}

/// Looks at the progress of its kernels. Returns the part of each device that those in flight can fill, 1 for the
/// whole device.
pub fn fills(session: &mut Session, gpu: &Gpu) -> [f32; MAX_DEVICES] {
    let mut fills = [0.0f32; MAX_DEVICES];
    let (mut ended, mut long) = ([0; MAX_DEVICES], [false; MAX_DEVICES]);
    let mut block = [(Duration::ZERO, Duration::ZERO); MAX_DEVICES];
    let streams = session
        .objects
        .streams
        .iter_mut()
        .chain(&mut session.objects.retired);
    for stream in streams.filter(|stream| !stream.capturing) {
        let at = stream.device.index();
        let (fill, some) = stream.fills(gpu, &session.shared.segment);
        fills[at] += fill;
        ended[at] += some;
        long[at] |= stream.pace.runs_long().is_some();
        block[at] = block[at].max(stream.long_block().unwrap_or_default());
        let compared = session.shared.standing.level(stream.device).is_compared();
        if compared && stream.is_unmarked() {
            let device = &gpu.devices[stream.device];
            let marked = device.make_current(&gpu.driver);
            if let Err(status) = marked.and_then(|()| stream.checkpoint(gpu)) {
                gpu.note_status(status);
            }
        }
    }
    for (at, fill) in fills.iter_mut().enumerate() {
        *fill = fill.min(1.0);
        if *fill > 0.0 || ended[at] > 0 {
            let standing = &session.shared.standing;
            standing.note_progress(at, ended[at], long[at]);
            standing.note_block(at, block[at]);
        }
    }
    fills
}

/// Notes that a kernel that can fill this part of the device was submitted to the stream at this index.
#[inline]
pub fn note_fill(session: &mut Session, index: usize, fill: f32) {
    if let Ok(stream) = session.objects.streams.at_mut(index) {
        stream.note_fill(fill);
    }
}

/// The part of the device that kernels with this number of waves of blocks leave free in the stream at this index.
#[inline]
pub fn confinement(session: &Session, gpu: &Gpu, index: usize, waves: f32) -> Option<Extent> {
    let stream = session.objects.streams.at(index).ok()?;
    let extent = gpu.devices[stream.device].reserve.confines(waves)?;
    let may = session.side == Side::MAIN
        && level(session, stream.device).gives_way()
        && !stream.is_special();
    may.then_some(extent)
}

/// Chooses the part of the device for the next operation of the stream at this index, which has been prepared and does not
/// capture. `waves`: how often its blocks fill the device; `None`: it needs the whole device. Returns the driver's
/// stream.
///
/// # Errors
/// The driver's status.
#[inline]
pub fn confine(
    session: &mut Session,
    gpu: &Gpu,
    index: usize,
    waves: Option<f32>,
) -> Result<CUstream, CUresult> {
    let confined = waves.and_then(|waves| confinement(session, gpu, index, waves));
    let stream = session.objects.streams.at_mut(index)?;
    if confined != stream.confined() {
        stream.set_confined(gpu, confined)?;
        stream.take_level(gpu, session.shared.standing.level(stream.device));
    }
    Ok(stream.raw)
}
