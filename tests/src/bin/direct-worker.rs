//! A client in direct mode that takes turn after turn until it is killed: `direct-worker CONTROL_SOCKET`.

use mpsshim_tests::direct_peer::DirectPeer;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let Some(control) = std::env::args().nth(1) else {
        eprintln!("usage: direct-worker CONTROL_SOCKET");
        return ExitCode::FAILURE;
    };
    match DirectPeer::connect(Path::new(&control)) {
        Ok(peer) => {
            peer.work(1, Duration::from_secs(600));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
