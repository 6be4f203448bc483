//! Counts of the objects of each kind that callers hold, for leak tests, and of the calls that are blocked (`driver_locks`).

use crate::api::Out;
use crate::driver::driver;
use crate::{driver_locks, graph, stream};

/// Every kind of object with how many there are, and the bytes in use of each device.
fn all() -> Vec<(String, u64)> {
    let Ok(driver) = driver() else {
        return Vec::new();
    };
    let mut counts: Vec<(String, u64)> = Vec::new();
    let mut count = |name: &str, number: usize| counts.push((name.into(), number as u64));
    count("contexts", driver.contexts.len());
    count("streams", driver.streams.len());
    count("destroyed-streams", stream::orphan_count());
    count("events", driver.events.len());
    count("modules", driver.modules.len());
    count("libraries", driver.libraries.len());
    count("linkers", driver.links.len());
    count("physical-memory", driver.physical.len());
    count("pools", driver.pools.len());
    count("arrays", driver.arrays.len());
    count("mipmapped-arrays", driver.mipmaps.len());
    let contexts = driver.contexts.all();
    let objects = contexts.iter().map(|context| context.objects.len());
    count("texture-objects", objects.sum());
    count("external-memory", driver.imports.len());
    count("green-contexts", driver.greens.len());
    count("resource-descriptions", driver.descriptions.len());
    for (name, number) in driver.ranges.counts() {
        count(name, number);
    }
    for (name, number) in graph::counts().into_iter().chain(driver_locks::counts()) {
        count(name, number);
    }
    for (ordinal, device) in driver.devices.iter().enumerate() {
        let used = device.used.load(std::sync::atomic::Ordering::Acquire);
        counts.push((format!("bytes-of-device-{ordinal}"), used));
    }
    counts
}

/// Writes a line for each kind of object, `NAME COUNT`, cut to `room` bytes; returns how many bytes all lines have.
///
/// Softgpu's own: the genuine driver has no such function.
#[unsafe(no_mangle)]
pub extern "C" fn softgpu_counts(to: Out<u8>, room: usize) -> usize {
    let text: String = all()
        .iter()
        .map(|(name, count)| format!("{name} {count}\n"))
        .collect();
    if !to.is_null() {
        for (at, byte) in text.bytes().take(room).enumerate() {
            to.at(at).put(byte);
        }
    }
    text.len()
}
