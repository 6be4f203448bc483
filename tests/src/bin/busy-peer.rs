//! A well-behaved client that is busy until it is killed: `busy-peer CONTROL-SOCKET`. Says when it has begun.

use mpsshim_tests::peer::Worker;
use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let control = std::env::args_os().nth(1).unwrap_or_default();
    let worker = Worker::connect(Path::new(&control))?;
    println!("busy");
    Err(io::Error::other(worker.run()))
}
