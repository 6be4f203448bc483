//! How much of a device the kernels of a session can fill, and their progress.

use super::Level;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
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
    let (mut moved, mut long) = ([false; MAX_DEVICES], [false; MAX_DEVICES]);
    let mut block = [(Duration::ZERO, Duration::ZERO); MAX_DEVICES];
    let streams = session
        .objects
        .streams
        .iter_mut()
        .chain(&mut session.objects.retired);
    for stream in streams.filter(|stream| !stream.capturing) {
        let at = stream.device.index();
        let (fill, ended) = stream.fills(gpu, &session.shared.segment);
        fills[at] += fill;
        moved[at] |= ended;
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
        if *fill > 0.0 || moved[at] {
            let standing = &session.shared.standing;
            standing.note_progress(at, moved[at], long[at]);
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
