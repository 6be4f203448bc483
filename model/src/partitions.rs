//! Static partitions: parts of a device's multiprocessors that an operator reserves for the clients that name them.
//!
//! A device is cut into chunks, the groups of multiprocessors into which its driver splits it, and a partition has whole
//! chunks. Multiprocessors that are in no chunk cannot be reserved.

use crate::device::DeviceInfo;
use crate::named::check_name;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of chunks of a device.
pub const MOST_CHUNKS: u32 = 1024;

/// How the driver splits a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunks {
    /// Multiprocessors of the device; 0 if the driver cannot split it.
    pub multiprocessors: u32,
    /// Multiprocessors of a chunk.
    pub size: u32,
    /// Number of chunks; the multiprocessors beyond `count * size` are in none.
    pub count: u32,
}

impl Chunks {
    /// Whether a device can be split so.
    pub fn is_plausible(self) -> bool {
        let total = u64::from(self.count) * u64::from(self.size);
        self.count <= MOST_CHUNKS && total <= u64::from(self.multiprocessors)
    }
}

/// A table of partitions: those of all devices that the servers of users have, or a named server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partitions {
    /// The chunks of each partition, from 0, by the device's UUID and the partition's id.
    devices: BTreeMap<String, BTreeMap<u32, Vec<u32>>>,
    #[serde(default)]
    names: Box<Names>,
}

/// The device's UUID and the id of each partition that an operator has named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Names(BTreeMap<String, (String, u32)>);

/// The name of a partition, as `CUDA_MPS_SM_PARTITION` has it.
pub fn name(uuid: &str, id: u32) -> String {
    format!("{uuid}/{id}")
}

/// The refusal of a name that another partition has.
pub fn name_is_taken(text: &str) -> String {
    format!("there is a partition {text} already")
}

impl Partitions {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// The partitions of a device: ids and chunks.
    pub fn of(&self, uuid: &str) -> impl Iterator<Item = (u32, &[u32])> {
        let partitions = self.devices.get(uuid).into_iter().flatten();
        partitions.map(|(id, chunks)| (*id, chunks.as_slice()))
    }

    /// The partitions of all devices: names and chunks.
    pub fn all(&self) -> impl Iterator<Item = (String, &[u32])> {
        let named = |uuid| {
            self.of(uuid)
                .map(move |(id, chunks)| (name(uuid, id), chunks))
        };
        self.devices.keys().flat_map(move |uuid| named(uuid))
    }

    /// The chunks of a device that are in partitions.
    pub fn used(&self, uuid: &str) -> BTreeSet<u32> {
        let chunks = self.of(uuid).flat_map(|(_, chunks)| chunks);
        chunks.copied().collect()
    }

    /// The partition with this [`name`]: the device's UUID, id, and chunks.
    pub fn find(&self, wanted: &str) -> Option<(&str, u32, &[u32])> {
        self.devices.iter().find_map(|(uuid, partitions)| {
            let mut partitions = partitions.iter();
            let (id, chunks) =
                partitions.find(|(id, _)| name(uuid, **id).eq_ignore_ascii_case(wanted))?;
            Some((uuid.as_str(), *id, chunks.as_slice()))
        })
    }

    /// Whether a device has a partition with this id.
    pub fn has(&self, uuid: &str, id: u32) -> bool {
        let partitions = self.devices.get(uuid);
        partitions.is_some_and(|partitions| partitions.contains_key(&id))
    }

    /// Whether a partition has this name of the operator's.
    pub fn has_name(&self, text: &str) -> bool {
        self.names.0.contains_key(text)
    }

    /// Name of the operator's and number of chunks of each partition of a device, sorted.
    pub fn sizes(&self, uuid: &str) -> Vec<(Option<&str>, u32)> {
        let size = |(id, chunks): (u32, &[u32])| (self.name_of(uuid, id), chunks.len() as u32);
        let mut sizes: Vec<_> = self.of(uuid).map(size).collect();
        sizes.sort_unstable();
        sizes
    }

    /// Whether both tables have partitions of the same names and numbers of chunks, whatever their ids.
    pub fn is_alike(&self, other: &Partitions) -> bool {
        let mut devices = self.devices.keys().chain(other.devices.keys());
        devices.all(|uuid| self.sizes(uuid) == other.sizes(uuid))
    }

    /// Whether an id on the same device is in both tables.
    pub fn shares_ids(&self, other: &Partitions) -> bool {
        let mut devices = self.devices.keys();
        devices.any(|uuid| self.of(uuid).any(|(id, _)| other.has(uuid, id)))
    }

    /// Whether a name of the operator's is in both tables.
    pub fn shares_names(&self, other: &Partitions) -> bool {
        self.names.0.keys().any(|text| other.has_name(text))
    }

    /// Gives new ids to the partitions whose id on their device is taken.
    pub fn renumber(&mut self, is_taken: impl Fn(&str, u32) -> bool) {
        for (uuid, partitions) in &mut self.devices {
            let taken: Vec<u32> = partitions
                .keys()
                .copied()
                .filter(|id| is_taken(uuid, *id))
                .collect();
            for old in taken {
                let is_free = |id: &u32| !partitions.contains_key(id) && !is_taken(uuid, *id);
                let new = (1..).find(is_free).unwrap_or(u32::MAX);
                if let Some(chunks) = partitions.remove(&old) {
                    partitions.insert(new, chunks);
                }
                let mut names = self.names.0.values_mut();
                if let Some((_, id)) = names.find(|(of, id)| of == uuid && *id == old) {
                    *id = new;
                }
            }
        }
    }

    /// Makes a partition of this number of chunks of a device. Returns its id, from 1, which is none that is taken.
    ///
    /// # Errors
    /// In words: the number is 0, not that many chunks are free, or the driver cannot split the device.
    pub fn add(
        &mut self,
        device: &DeviceInfo,
        count: u32,
        is_taken: impl Fn(u32) -> bool,
    ) -> Result<u32, String> {
        let (uuid, all) = (&device.uuid, device.chunks);
        if all.count == 0 {
            return Err(format!("The driver cannot partition device {uuid}"));
        }
        if count == 0 {
            return Err("A partition has at least one chunk".to_owned());
        }
        let used = self.used(uuid);
        let free: Vec<u32> = (0..all.count)
            .filter(|chunk| !used.contains(chunk))
            .collect();
        let Some(chunks) = free.get(..count as usize) else {
            return Err(format!(
                "Device {uuid} has {} free chunks of {}, fewer than {count}",
                free.len(),
                all.count
            ));
        };
        let partitions = self.devices.entry(uuid.clone()).or_default();
        let is_free = |id: &u32| !partitions.contains_key(id) && !is_taken(*id);
        let id = (1..).find(is_free).unwrap_or(u32::MAX);
        partitions.insert(id, chunks.to_vec());
        Ok(id)
    }

    /// Names a partition.
    ///
    /// # Errors
    /// The name is none, or another partition's, in words.
    pub fn set_name(&mut self, text: &str, uuid: &str, id: u32) -> Result<(), String> {
        check_name(text)?;
        if self.has_name(text) {
            return Err(name_is_taken(text));
        }
        self.names.0.insert(text.to_owned(), (uuid.to_owned(), id));
        Ok(())
    }

    /// The operator's name of a partition.
    pub fn name_of(&self, uuid: &str, id: u32) -> Option<&str> {
        let mut names = self.names.0.iter();
        let found = names.find(|(_, (other, number))| other == uuid && *number == id);
        found.map(|(text, _)| text.as_str())
    }

    /// The partition with this name of the operator's or this [`name`]: the device's UUID and the id.
    pub fn find_named(&self, wanted: &str) -> Option<(&str, u32)> {
        let named = self.names.0.get(wanted);
        let named = named.map(|(uuid, id)| (uuid.as_str(), *id));
        named.or_else(|| self.find(wanted).map(|(uuid, id, _)| (uuid, id)))
    }

    /// Removes a partition. Returns whether it existed.
    pub fn remove(&mut self, uuid: &str, id: u32) -> bool {
        let Some(partitions) = self.devices.get_mut(uuid) else {
            return false;
        };
        let existed = partitions.remove(&id).is_some();
        self.names
            .0
            .retain(|_, (other, number)| other != uuid || *number != id);
        if partitions.is_empty() {
            self.devices.remove(uuid);
        }
        existed
    }

    /// Whether no two partitions have a chunk in common, none is empty, no id is 0, and each name is that of a partition
    /// without another one.
    pub fn is_plausible(&self) -> bool {
        let named: BTreeSet<_> = self.names.0.values().collect();
        let is_name = |(text, (uuid, id)): (&String, &(String, u32))| {
            check_name(text).is_ok() && self.of(uuid).any(|(known, _)| known == *id)
        };
        if named.len() < self.names.0.len() || !self.names.0.iter().all(is_name) {
            return false;
        }
        self.devices.values().all(|partitions| {
            let chunks = || partitions.values().flatten();
            let distinct: BTreeSet<_> = chunks().collect();
            let is_one = |(id, chunks): (&u32, &Vec<u32>)| *id > 0 && !chunks.is_empty();
            partitions.iter().all(is_one)
                && distinct.len() == chunks().count()
                && distinct.iter().all(|chunk| **chunk < MOST_CHUNKS)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200: 15 chunks of 8 multiprocessors, and 12 more.
    fn h200(uuid: &str) -> DeviceInfo {
        DeviceInfo {
            name: "NVIDIA H200".into(),
            uuid: uuid.into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Chunks {
                multiprocessors: 132,
                size: 8,
                count: 15,
            },
        }
    }

    fn none(_: u32) -> bool {
        false
    }

    #[test]
    fn ids_and_names_are_compared_between_tables() {
        let device = h200("GPU-aa");
        let (mut first, mut second) = (Partitions::default(), Partitions::default());
        assert_eq!(first.add(&device, 5, none), Ok(1));
        assert_eq!(first.add(&device, 2, none), Ok(2));
        assert_eq!(second.add(&device, 3, |id| first.has("GPU-aa", id)), Ok(3));
        assert_eq!(second.set_name("a", "GPU-aa", 3), Ok(()));
        assert!(!first.shares_ids(&second) && !first.shares_names(&second));
        let mut third = first.clone();
        assert!(third.shares_ids(&first));
        assert_eq!(third.set_name("a", "GPU-aa", 2), Ok(()));
        assert!(third.shares_names(&second) && second.shares_names(&third));
        assert!(!third.is_alike(&first), "a name more");
        let before = third.clone();
        third.renumber(|uuid, id| first.has(uuid, id) || second.has(uuid, id));
        assert!(!third.shares_ids(&first) && !third.shares_ids(&second));
        assert!(third.is_alike(&before) && third.is_plausible());
        assert_eq!(third.find_named("a"), Some(("GPU-aa", 5)));
        assert_eq!(third.used("GPU-aa"), before.used("GPU-aa"));
        assert_eq!(third.sizes("GPU-aa"), [(None, 5), (Some("a"), 2)]);
        assert!(!second.is_alike(&Partitions::default()));
        assert!(!Partitions::default().is_alike(&second));
    }

    #[test]
    fn partitions_have_different_chunks() {
        let (mut partitions, device) = (Partitions::default(), h200("GPU-aa"));
        assert_eq!(partitions.add(&device, 5, none), Ok(1));
        assert_eq!(partitions.add(&device, 9, none), Ok(2));
        let why = partitions.add(&device, 2, none).expect_err("too many");
        assert_eq!(why, "Device GPU-aa has 1 free chunks of 15, fewer than 2");
        assert!(partitions.add(&device, 0, none).is_err());
        assert!(partitions.remove("GPU-aa", 1));
        assert!(!partitions.remove("GPU-aa", 1));
        assert!(!partitions.remove("GPU-bb", 2));
        assert_eq!(partitions.add(&device, 6, none), Ok(1));
        assert_eq!(partitions.used("GPU-aa").len(), 15);
        let first: Vec<u32> = (0..5).chain([14]).collect();
        assert_eq!(partitions.find("gpu-AA/1"), Some(("GPU-aa", 1, &first[..])));
        for unknown in ["GPU-aa/3", "GPU-aa/01", "GPU-aa", "GPU-bb/1", ""] {
            assert_eq!(partitions.find(unknown), None, "{unknown}");
        }
        assert!(partitions.is_plausible());
    }

    #[test]
    fn a_device_that_cannot_be_split_has_no_partitions() {
        let device = DeviceInfo {
            chunks: Chunks::default(),
            ..h200("GPU-aa")
        };
        let why = Partitions::default().add(&device, 1, none);
        assert_eq!(why, Err("The driver cannot partition device GPU-aa".into()));
    }

    #[test]
    fn a_name_goes_with_its_partition() {
        let (mut partitions, device) = (Partitions::default(), h200("GPU-aa"));
        assert_eq!(partitions.add(&device, 1, none), Ok(1));
        assert_eq!(partitions.set_name("train", "GPU-aa", 1), Ok(()));
        let twice = partitions.set_name("train", "GPU-aa", 2);
        assert_eq!(twice, Err("there is a partition train already".into()));
        assert!(partitions.set_name("A", "GPU-aa", 1).is_err());
        assert_eq!(partitions.name_of("GPU-aa", 1), Some("train"));
        for wanted in ["train", "gpu-aa/1"] {
            assert_eq!(partitions.find_named(wanted), Some(("GPU-aa", 1)));
        }
        let json = serde_json::to_string(&partitions).expect("json");
        assert_eq!(serde_json::from_str(&json).ok().as_ref(), Some(&partitions));
        assert!(partitions.is_plausible());
        assert!(partitions.remove("GPU-aa", 1));
        assert_eq!(partitions, Partitions::default());
    }

    #[test]
    fn names_that_no_daemon_gives_are_recognized() {
        for names in [
            r#"{"a":["GPU-aa",2]}"#,
            r#"{"a":["GPU-bb",1]}"#,
            r#"{"A":["GPU-aa",1]}"#,
            r#"{"a":["GPU-aa",1],"b":["GPU-aa",1]}"#,
        ] {
            let json = format!(r#"{{"devices":{{"GPU-aa":{{"1":[0]}}}},"names":{names}}}"#);
            let partitions: Partitions = serde_json::from_str(&json).expect("partitions");
            assert!(!partitions.is_plausible(), "{json}");
        }
    }

    #[test]
    fn partitions_that_no_daemon_makes_are_recognized() {
        for devices in [
            r#"{"GPU-aa":{"1":[0,1],"2":[1]}}"#,
            r#"{"GPU-aa":{"1":[]}}"#,
            r#"{"GPU-aa":{"0":[1]}}"#,
            r#"{"GPU-aa":{"1":[1024]}}"#,
        ] {
            let json = format!(r#"{{"devices":{devices}}}"#);
            let partitions: Partitions = serde_json::from_str(&json).expect("partitions");
            assert!(!partitions.is_plausible(), "{json}");
        }
    }
}
