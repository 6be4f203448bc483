//! A session's turn to print, and its printed text ([`super`]).

use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
use mpsshim_api::cuda::{CUDA_ERROR_NOT_READY, CUresult};
use std::time::{Duration, Instant};

/// Maximum time for which a request for printed text waits for the session's streams to become idle.
const SETTLING: Duration = Duration::from_millis(1);

/// Whether this session may launch a printing kernel now; takes the turn if it is free.
pub fn may_print(session: &mut Session, gpu: &Gpu) -> bool {
    if !session.flow.printed.holds {
        session.flow.printed.holds = gpu.printing.take_turn(session.shared.info.session);
    }
    session.flow.printed.holds
}

/// Whether it has the turn.
pub fn prints(session: &Session) -> bool {
    session.flow.printed.holds
}

/// Fetches the printed text and releases the turn if nothing is in flight.
pub fn stop_printing(session: &mut Session, gpu: &Gpu) {
    if session.flow.printed.holds && !session.has_work_in_flight(gpu) && is_idle(session, gpu) {
        surrender_printing(session, gpu);
    }
}

/// Releases the turn for an ended session whose streams are idle. Its count of work in flight is ignored, because
/// work not covered by a flag would count as in flight forever.
pub fn surrender_printing(session: &mut Session, gpu: &Gpu) {
    if !session.flow.printed.holds {
        return gpu.printing.drop_unclaimed();
    }
    // Its text is fetched even though it will never be requested, so that it is not attributed to the next holder.
    if let Err(status) = fetch_printed(session, gpu) {
        gpu.note_status(status);
    }
    session.flow.printed.holds = false;
    gpu.printing.end_turn();
}

/// Whether the driver reports all streams as idle. The flags that [`Session::has_work_in_flight`] reads may change
/// a moment before the driver notices, and synchronizing must not wait.
pub fn is_idle(session: &Session, gpu: &Gpu) -> bool {
    let works = session
        .objects
        .streams
        .iter()
        .chain(&session.objects.retired);
    works.filter(|stream| !stream.capturing).all(|stream| {
        let _ = gpu.devices[stream.device].make_current(&gpu.driver);
        gpu.driver.stream_query(stream.raw) != Err(CUDA_ERROR_NOT_READY)
    })
}

fn fetch_printed(session: &mut Session, gpu: &Gpu) -> Result<(), CUresult> {
    let works = session
        .objects
        .streams
        .iter()
        .chain(&session.objects.retired);
    for stream in works.filter(|stream| !stream.capturing) {
        gpu.devices[stream.device].make_current(&gpu.driver)?;
        gpu.driver.stream_synchronize(stream.raw)?;
    }
    session.flow.printed.add(&gpu.printing.take_output());
    Ok(())
}

/// Takes the next `room` bytes printed by its kernels. Returns them and the number of remaining bytes.
pub fn take_printed(
    session: &mut Session,
    gpu: &Gpu,
    room: usize,
) -> Result<(Vec<u8>, usize), CUresult> {
    // The driver may notice the completion a moment later than the client.
    if session.flow.printed.holds {
        let began = Instant::now();
        while !is_idle(session, gpu) && began.elapsed() < SETTLING {
            std::thread::yield_now();
        }
        if session.has_work_in_flight(gpu) {
            // Other streams are still working, but the text of the work that the client waited for is complete.
            session.flow.printed.add(&gpu.printing.take_output());
        } else {
            stop_printing(session, gpu);
        }
    }
    let count = session.flow.printed.text.len().min(room);
    let text = session.flow.printed.text.drain(..count).collect();
    Ok((text, session.flow.printed.text.len()))
}
