//! Active-thread percentages: a client that may use a part of a device's multiprocessors gets a green context of so
//! many, and its streams are made in there.
//!
//! The driver splits a device into groups of multiprocessors that thread block clusters fit into (eight on compute
//! capability 9.0) and a remainder. A place is a run of groups, with or without the remainder. Finer splits exist, but
//! kernels with clusters of more than two blocks are refused there (docs/design/0010-limits.md).

use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::green::{Green, GreenRef, description};
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Most groups that are asked for: more than any device has multiprocessors.
const MAX_GROUPS: usize = 1024;

/// How a device can be parted.
#[derive(Debug)]
pub struct Partition {
    /// Multiprocessors of the device.
    pub total: u32,
    /// The groups, then the remainder if there is one.
    pieces: Vec<CUdevResource>,
    groups: usize,
    /// How many places each piece is in.
    load: Mutex<Vec<u32>>,
    /// Green contexts by what they are made of. The driver keeps some of the memory of a green context that ends, so
    /// none of them ends.
    made: Mutex<HashMap<Vec<usize>, GreenRef>>,
}

/// Multiprocessors that a client may use.
#[derive(Debug)]
pub struct Place {
    partition: Arc<Partition>,
    pieces: Vec<usize>,
    /// How many.
    pub count: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut load = self.partition.load.lock();
        for piece in &self.pieces {
            load[*piece] -= 1;
        }
    }
}

impl Partition {
    /// Asks the driver how the device can be parted. Needs no context.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_SUPPORTED` when it has no green contexts.
    pub fn new(driver: &Driver, device: CUdevice) -> Result<Partition, CUresult> {
        let driver = &driver.context;
        let mut whole = CUdevResource::INVALID;
        driver.device_get_dev_resource(device, &mut whole, CU_DEV_RESOURCE_TYPE_SM)?;
        let mut pieces = vec![CUdevResource::INVALID; MAX_GROUPS];
        let mut count = MAX_GROUPS as u32;
        let mut remainder = CUdevResource::INVALID;
        driver.split_by_count(
            pieces.as_mut_ptr(),
            &mut count,
            &whole,
            &mut remainder,
            0,
            1,
        )?;
        pieces.truncate(count as usize);
        let groups = pieces.len();
        if groups == 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if remainder.kind == CU_DEV_RESOURCE_TYPE_SM && remainder.sm[0] > 0 {
            pieces.push(remainder);
        }
        Ok(Partition::of(whole.sm[0], pieces, groups))
    }

    fn of(total: u32, pieces: Vec<CUdevResource>, groups: usize) -> Partition {
        Partition {
            total,
            load: Mutex::new(vec![0; pieces.len()]),
            pieces,
            groups,
            made: Mutex::default(),
        }
    }

    /// Streams that are kept in its green contexts, and how many of these there are.
    pub fn kept(&self) -> (usize, usize) {
        let made = self.made.lock();
        let streams = made.values().map(|green| green.kept_streams()).sum();
        (streams, made.len())
    }

    fn size(&self, piece: usize) -> u32 {
        self.pieces[piece].sm[0]
    }

    /// A place of at most `cap` multiprocessors, one group at the least: where the fewest others are.
    pub fn place(self: &Arc<Partition>, cap: u32) -> Place {
        let unit = self.size(0);
        let remainder = self.pieces.get(self.groups).map(|rest| rest.sm[0]);
        let mut load = self.load.lock();
        let alone = |pieces: &[usize]| -> u64 {
            let share =
                |piece: &usize| u64::from(self.size(*piece)) * 840 / u64::from(load[*piece] + 1);
            pieces.iter().map(share).sum()
        };
        let mut best: Option<(u64, Vec<usize>)> = None;
        let mut consider = |pieces: Vec<usize>| {
            let score = alone(&pieces);
            if best.as_ref().is_none_or(|(most, _)| score > *most) {
                best = Some((score, pieces));
            }
        };
        let runs = |count: usize| {
            let last = self.groups - count;
            (0..=last).step_by(count).chain([last])
        };
        // Who has over half of the device takes the remainder: whole groups are then left for the others.
        let large = cap > self.total / 2;
        let plain = ((cap / unit) as usize).clamp(1, self.groups);
        if !(large && remainder.is_some_and(|rest| rest + unit <= cap)) {
            for start in runs(plain) {
                consider((start..start + plain).collect());
            }
        }
        // Never alone: clusters of more than two blocks do not fit into it.
        if let Some(rest) = remainder.filter(|rest| rest + unit <= cap) {
            let count = (((cap - rest) / unit) as usize).min(self.groups);
            for start in runs(count) {
                consider((start..start + count).chain([self.groups]).collect());
            }
        }
        let (_, pieces) = best.expect("one run at the least");
        for piece in &pieces {
            load[*piece] += 1;
        }
        Place {
            count: pieces.iter().map(|piece| self.size(*piece)).sum(),
            pieces,
            partition: self.clone(),
        }
    }
}

impl Place {
    /// The green context, made on first use; the device has a context. Takes 2 ms and 6 MiB of the device the first time.
    ///
    /// # Errors
    /// The driver's.
    pub fn green(&self, driver: &Driver, device: &Device) -> Result<GreenRef, CUresult> {
        let mut made = self.partition.made.lock();
        if let Some(green) = made.get(&self.pieces) {
            return Ok(green.clone());
        }
        device.make_current(driver)?;
        let resources = self
            .pieces
            .iter()
            .map(|piece| self.partition.pieces[*piece]);
        let description = description(driver, resources.collect())?;
        let mut raw = CUgreenCtx::NULL;
        let flags = CU_GREEN_CTX_DEFAULT_STREAM;
        let functions = &driver.context;
        functions.green_create(&mut raw, description, device.raw, flags)?;
        let green = Arc::new(Green::lasting(driver, raw, device.ordinal)?);
        made.insert(self.pieces.clone(), green.clone());
        Ok(green)
    }

    /// Whether it is made and has a stream that was kept. Does not wait while one is made.
    pub fn has_stream(&self, priority: i32) -> bool {
        let made = self.partition.made.try_lock();
        let green = made.as_ref().and_then(|made| made.get(&self.pieces));
        green.is_some_and(|green| green.has_stream(priority))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an H200 is parted: 15 groups of 8 and a remainder of 12.
    fn h200() -> Arc<Partition> {
        let piece = |count| CUdevResource {
            kind: CU_DEV_RESOURCE_TYPE_SM,
            sm: [count, 8, 8],
            ..CUdevResource::INVALID
        };
        let mut pieces = vec![piece(8); 15];
        pieces.push(piece(12));
        Arc::new(Partition::of(132, pieces, 15))
    }

    fn overlap(a: &Place, b: &Place) -> usize {
        a.pieces
            .iter()
            .filter(|piece| b.pieces.contains(piece))
            .count()
    }

    #[test]
    fn three_thirds_lie_apart() {
        let device = h200();
        let places: Vec<Place> = (0..3).map(|_| device.place(43)).collect();
        assert!(places.iter().all(|place| place.count == 40));
        assert_eq!(overlap(&places[0], &places[1]), 0);
        assert_eq!(overlap(&places[0], &places[2]), 0);
        assert_eq!(overlap(&places[1], &places[2]), 0);
    }

    #[test]
    fn a_quarter_and_three_quarters_lie_apart_in_either_order() {
        for caps in [[33, 99], [99, 33]] {
            let device = h200();
            let [first, second] = caps.map(|cap| device.place(cap));
            assert_eq!(overlap(&first, &second), 0, "{caps:?}");
            let mut counts = [first.count, second.count];
            counts.sort_unstable();
            assert_eq!(counts, [32, 92]);
        }
    }

    #[test]
    fn a_place_is_within_its_cap_and_not_empty() {
        for cap in 0..132 {
            let device = h200();
            for _ in 0..20 {
                let place = device.place(cap);
                assert!(place.count <= cap.max(8), "{cap}: {}", place.count);
                assert!(
                    place.count >= 8 && place.count + 20 > cap,
                    "{cap}: {}",
                    place.count
                );
                std::mem::forget(place);
            }
        }
    }

    #[test]
    fn who_leaves_makes_room() {
        let device = h200();
        let first = device.place(64);
        let pieces = first.pieces.clone();
        drop(first);
        assert_eq!(device.place(64).pieces, pieces);
        assert!(device.load.lock().iter().all(|load| *load == 0));
    }
}
