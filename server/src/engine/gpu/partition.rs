//! Active thread percentages and static partitions: a client limited to a part of a device's multiprocessors gets a green
//! context of that many, in which its streams are created.
//!
//! The driver splits a device into groups of multiprocessors that thread block clusters fit into (eight on compute
//! capability 9.0) and a remainder. A place is a run of groups, with or without the remainder. Finer splits exist, but
//! kernels with clusters of more than two blocks are refused there (docs/design/0010-limits.md).
//!
//! The groups are the chunks of static partitions: a client with a partition has places among its groups only, other
//! clients among the rest of the device.

use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::green::{Green, GreenRef, description};
use mpsshim_api::cuda::*;
use mpsshim_model::limits::Percentage;
use mpsshim_model::partitions::Chunks;
use mpsshim_proto::message::context::MAX_GROUPS;
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The pieces into which a device can be partitioned.
#[derive(Debug)]
pub struct Partition {
    /// Multiprocessors of the device.
    pub total: u32,
    /// The groups, then the remainder if there is one.
    pieces: Vec<CUdevResource>,
    groups: usize,
    /// Number of places that include each piece.
    load: Mutex<Vec<u32>>,
    /// Green contexts by their pieces. The driver keeps some memory of a destroyed green context, so none is destroyed.
    made: Mutex<HashMap<Vec<usize>, GreenRef>>,
}

/// Multiprocessors assigned to a client.
#[derive(Debug)]
pub struct Place {
    partition: Arc<Partition>,
    pieces: Vec<usize>,
    /// The pieces of which they are a part.
    ground: Vec<usize>,
    /// Number of multiprocessors; 0: the client must not use the device.
    pub count: u32,
}

/// The part of a device in which a client may have a place, as chunks.
#[derive(Clone, Copy, Debug)]
pub enum Ground<'a> {
    /// Chunks of a static partition.
    Chunks(&'a [u32]),
    /// The device without these chunks.
    Without(&'a BTreeSet<u32>),
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
    /// Asks the driver how the device can be partitioned. Needs no context.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_NOT_SUPPORTED` if it has no green contexts.
    pub fn new(driver: &Driver, device: CUdevice) -> Result<Partition, CUresult> {
        let driver = &driver.context;
        let mut whole = CUdevResource::INVALID;
        driver.device_get_dev_resource(device, &mut whole, CU_DEV_RESOURCE_TYPE_SM)?;
        let mut pieces = vec![CUdevResource::INVALID; MAX_GROUPS as usize];
        let mut count = MAX_GROUPS;
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

    /// Number of streams kept in its green contexts, and number of green contexts.
    pub fn kept(&self) -> (usize, usize) {
        let made = self.made.lock();
        let streams = made.values().map(|green| green.kept_streams()).sum();
        (streams, made.len())
    }

    /// The chunks of the device.
    pub fn chunks(&self) -> Chunks {
        Chunks {
            multiprocessors: self.total,
            size: self.size(0),
            count: self.groups as u32,
        }
    }

    fn size(&self, piece: usize) -> u32 {
        self.pieces[piece].sm[0]
    }

    fn size_of(&self, pieces: &[usize]) -> u32 {
        pieces.iter().map(|piece| self.size(*piece)).sum()
    }

    /// A place of at most `cap` multiprocessors but at least one group, located where it overlaps the fewest other
    /// places.
    pub fn place(self: &Arc<Partition>, cap: u32) -> Place {
        self.place_on((0..self.pieces.len()).collect(), cap)
    }

    /// A place in a part of the device, of a percentage of this part; without multiprocessors if the part has none.
    pub fn place_in(self: &Arc<Partition>, ground: Ground<'_>, threads: Percentage) -> Place {
        let has = |piece: &usize| match ground {
            Ground::Chunks(chunks) => *piece < self.groups && chunks.contains(&(*piece as u32)),
            Ground::Without(chunks) => !chunks.contains(&(*piece as u32)),
        };
        let ground: Vec<usize> = (0..self.pieces.len()).filter(has).collect();
        let cap = threads.of(self.size_of(&ground));
        self.place_on(ground, cap)
    }

    /// A place of exactly this many multiprocessors; `None` if the device has no such place.
    pub fn place_of_size(self: &Arc<Partition>, count: u32) -> Option<Place> {
        self.place_of_size_on((0..self.pieces.len()).collect(), count)
    }

    fn place_of_size_on(self: &Arc<Partition>, ground: Vec<usize>, count: u32) -> Option<Place> {
        let mut load = self.load.lock();
        let pieces = self.pieces_of_size(&ground, count, &load)?;
        Some(self.taken(ground, pieces, &mut load))
    }

    /// `ground`: pieces, in order.
    fn place_on(self: &Arc<Partition>, ground: Vec<usize>, cap: u32) -> Place {
        let mut load = self.load.lock();
        let pieces = self.pieces_for(&ground, cap, &load);
        self.taken(ground, pieces, &mut load)
    }

    fn taken(
        self: &Arc<Partition>,
        ground: Vec<usize>,
        pieces: Vec<usize>,
        load: &mut [u32],
    ) -> Place {
        for piece in &pieces {
            load[*piece] += 1;
        }
        Place {
            count: self.size_of(&pieces),
            pieces,
            ground,
            partition: self.clone(),
        }
    }

    /// The groups of this ground, and the size of the remainder if it is a part of the ground.
    fn groups_of(&self, ground: &[usize]) -> (Vec<usize>, Option<u32>) {
        let groups: Vec<usize> = ground
            .iter()
            .copied()
            .filter(|piece| *piece < self.groups)
            .collect();
        let has_remainder = groups.len() < ground.len();
        let remainder = has_remainder.then(|| self.size(self.groups));
        (groups, remainder)
    }

    /// The pieces for a place of at most `cap` multiprocessors on this ground, where `load` places include each piece.
    fn pieces_for(&self, ground: &[usize], cap: u32, load: &[u32]) -> Vec<usize> {
        let unit = self.size(0);
        let (groups, remainder) = self.groups_of(ground);
        if groups.is_empty() {
            return ground.to_vec();
        }
        let mut best = Best::new(self, load);
        // A place of over half of the device includes the remainder, which leaves whole groups for the others.
        let large = cap > self.size_of(ground) / 2;
        let plain = ((cap / unit) as usize).clamp(1, groups.len());
        if !(large && remainder.is_some_and(|rest| rest + unit <= cap)) {
            best.consider_runs(&groups, plain, false);
        }
        // Never the remainder alone beside groups: clusters of more than two blocks do not fit into it.
        if let Some(rest) = remainder.filter(|rest| rest + unit <= cap) {
            let count = (((cap - rest) / unit) as usize).min(groups.len());
            best.consider_runs(&groups, count, true);
        }
        best.pieces().expect("one run at the least")
    }

    /// The pieces for a place of exactly this many multiprocessors on this ground.
    fn pieces_of_size(&self, ground: &[usize], count: u32, load: &[u32]) -> Option<Vec<usize>> {
        let (groups, remainder) = self.groups_of(ground);
        if groups.is_empty() {
            return (count == self.size_of(ground)).then(|| ground.to_vec());
        }
        let unit = self.size(0);
        let mut best = Best::new(self, load);
        for rest in [Some(0), remainder].into_iter().flatten() {
            let of_groups = count.checked_sub(rest).filter(|size| size % unit == 0);
            let number = of_groups.map_or(0, |size| (size / unit) as usize);
            if (1..=groups.len()).contains(&number) {
                best.consider_runs(&groups, number, rest > 0);
            }
        }
        best.pieces()
    }
}

/// The run of pieces whose multiprocessors have the fewest other places.
struct Best<'a> {
    partition: &'a Partition,
    load: &'a [u32],
    best: Option<(u64, Vec<usize>)>,
}

impl<'a> Best<'a> {
    fn new(partition: &'a Partition, load: &'a [u32]) -> Best<'a> {
        Best {
            partition,
            load,
            best: None,
        }
    }

    fn consider(&mut self, pieces: Vec<usize>) {
        let share = |piece: &usize| {
            let size = u64::from(self.partition.size(*piece));
            size * 840 / u64::from(self.load[*piece] + 1)
        };
        let score: u64 = pieces.iter().map(share).sum();
        if self.best.as_ref().is_none_or(|(most, _)| score > *most) {
            self.best = Some((score, pieces));
        }
    }

    /// Considers runs of `count` groups, with or without the remainder.
    fn consider_runs(&mut self, groups: &[usize], count: usize, with_remainder: bool) {
        let last = groups.len() - count;
        for start in (0..=last).step_by(count).chain([last]) {
            let run = groups[start..start + count].iter().copied();
            let remainder = with_remainder.then_some(self.partition.groups);
            self.consider(run.chain(remainder).collect());
        }
    }

    fn pieces(self) -> Option<Vec<usize>> {
        self.best.map(|(_, pieces)| pieces)
    }
}

impl Place {
    /// A place on the same ground, of a percentage of it.
    pub fn part(&self, threads: Percentage) -> Place {
        let cap = threads.of(self.partition.size_of(&self.ground));
        self.partition.place_on(self.ground.clone(), cap)
    }

    /// A place on the same ground, of exactly this many multiprocessors; `None` if it has no such place.
    pub fn part_of_size(&self, count: u32) -> Option<Place> {
        let partition = &self.partition;
        partition.place_of_size_on(self.ground.clone(), count)
    }

    /// A description of its multiprocessors, from which a green context is created.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_DEVICE_UNAVAILABLE` if it has none.
    pub fn description(&self, driver: &Driver) -> Result<CUdevResourceDesc, CUresult> {
        if self.pieces.is_empty() {
            return Err(CUDA_ERROR_DEVICE_UNAVAILABLE);
        }
        let resources = self
            .pieces
            .iter()
            .map(|piece| self.partition.pieces[*piece]);
        description(driver, resources.collect())
    }

    /// The green context, created on first use; the device must have a context. The first call takes 2 ms and 6 MiB of
    /// device memory.
    ///
    /// # Errors
    /// As [`Place::description`].
    pub fn green(&self, driver: &Driver, device: &Device) -> Result<GreenRef, CUresult> {
        let mut made = self.partition.made.lock();
        if let Some(green) = made.get(&self.pieces) {
            return Ok(green.clone());
        }
        device.make_current(driver)?;
        let description = self.description(driver)?;
        let mut raw = CUgreenCtx::NULL;
        let flags = CU_GREEN_CTX_DEFAULT_STREAM;
        let functions = &driver.context;
        functions.green_create(&mut raw, description, device.raw, flags)?;
        let green = Arc::new(Green::lasting(driver, raw, device.ordinal)?);
        made.insert(self.pieces.clone(), green.clone());
        Ok(green)
    }

    /// Whether the green context exists and has a kept stream of this priority. Does not wait for one being created.
    pub fn has_stream(&self, priority: i32) -> bool {
        let made = self.partition.made.try_lock();
        let green = made.as_ref().and_then(|made| made.get(&self.pieces));
        green.is_some_and(|green| green.has_stream(priority))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of an H200: 15 groups of 8 and a remainder of 12.
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
    fn places_in_static_partitions_stay_within_them() {
        let device = h200();
        let chunks: Vec<u32> = (2..7).collect();
        let used: BTreeSet<u32> = chunks.iter().copied().collect();
        let threads = |percent: &str| percent.parse::<Percentage>().expect(percent);
        for (percent, inside, outside) in [("100", 40, 92), ("50", 16, 44), ("1", 8, 8)] {
            let place = device.place_in(Ground::Chunks(&chunks), threads(percent));
            let rest = device.place_in(Ground::Without(&used), threads(percent));
            assert_eq!((place.count, rest.count), (inside, outside), "{percent}");
            assert!(place.pieces.iter().all(|piece| (2..7).contains(piece)));
            assert_eq!(overlap(&place, &rest), 0);
            let part = place.part(threads("50"));
            assert_eq!(part.count, 16);
            assert!(part.pieces.iter().all(|piece| (2..7).contains(piece)));
        }
    }

    #[test]
    fn a_device_in_partitions_leaves_the_remainder_or_nothing() {
        let all: BTreeSet<u32> = (0..15).collect();
        let rest = h200().place_in(Ground::Without(&all), Percentage::ALL);
        assert_eq!(rest.count, 12);
        let pieces = h200().pieces[..15].to_vec();
        let whole = Arc::new(Partition::of(120, pieces, 15));
        let rest = whole.place_in(Ground::Without(&all), Percentage::ALL);
        assert_eq!((rest.count, rest.pieces.len()), (0, 0));
        assert_eq!(
            whole.place_in(Ground::Chunks(&[99]), Percentage::ALL).count,
            0
        );
    }

    #[test]
    fn a_place_has_the_same_size_again_whatever_else_is_there() {
        for cap in 0..=132 {
            let device = h200();
            let count = device.place(cap).count;
            for _ in 0..20 {
                let place = device.place_of_size(count).expect("a place");
                assert_eq!(place.count, count);
                assert_eq!(place.part_of_size(count).map(|one| one.count), Some(count));
                std::mem::forget(place);
            }
        }
        let device = h200();
        for count in [0, 1, 12, 15, 133, 140, u32::MAX] {
            assert!(device.place_of_size(count).is_none(), "{count}");
        }
        let chunks: Vec<u32> = (2..7).collect();
        let inside = device.place_in(Ground::Chunks(&chunks), Percentage::ALL);
        let part = inside.part_of_size(16).expect("a place");
        assert!(part.pieces.iter().all(|piece| (2..7).contains(piece)));
        assert!(inside.part_of_size(48).is_none());
        let all: BTreeSet<u32> = (0..15).collect();
        let rest = device.place_in(Ground::Without(&all), Percentage::ALL);
        assert_eq!(rest.part_of_size(12).map(|one| one.count), Some(12));
        assert!(rest.part_of_size(8).is_none());
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
