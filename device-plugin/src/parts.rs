//! Parts of GPUs: names, the limits that an allocation amounts to, and preferred allocations.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Between a GPU's UUID and the number of a part.
const BETWEEN: &str = "::";

/// Kubelet's identifier of a part.
pub fn id(gpu: &str, number: u32) -> String {
    format!("{gpu}{BETWEEN}{number}")
}

/// The GPU and the number of a part.
fn of_id(id: &str) -> Option<(&str, u32)> {
    let (gpu, number) = id.rsplit_once(BETWEEN)?;
    Some((gpu, number.parse().ok()?))
}

/// Reasons to refuse a set of parts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// Not one of the plugin's.
    #[error("{0} is not a part of a GPU")]
    NoPart(String),
    /// Nothing is asked for.
    #[error("the request names no part of a GPU")]
    Nothing,
    /// A program's share is of one GPU.
    #[error(
        "no GPU of the node has {asked} parts left, and a container can have parts of one GPU only (these are of \
         {gpus}): ask for fewer, or wait until others have ended"
    )]
    SeveralGpus {
        /// How many parts.
        asked: usize,
        /// UUIDs.
        gpus: String,
    },
}

/// The GPU to which all these parts belong, and their number.
///
/// # Errors
/// An id names no part of a GPU, there are no ids, or they belong to several GPUs.
pub fn share(ids: &[String]) -> Result<(&str, u32), ShareError> {
    let parts = ids
        .iter()
        .map(|id| of_id(id).ok_or_else(|| ShareError::NoPart(id.clone())));
    let parts = parts.collect::<Result<BTreeSet<_>, _>>()?;
    let gpus: BTreeSet<_> = parts.iter().map(|(gpu, _)| *gpu).collect();
    let gpus: Vec<_> = gpus.into_iter().collect();
    match gpus[..] {
        [] => Err(ShareError::Nothing),
        [gpu] => Ok((gpu, parts.len() as u32)),
        _ => Err(ShareError::SeveralGpus {
            asked: parts.len(),
            gpus: gpus.join(" and "),
        }),
    }
}

/// `count` of `all` parts in percent, rounded down, so that the sum stays within 100; at least 1.
pub fn percentage(count: u32, all: u32) -> u32 {
    (count * 100 / all).max(1)
}

/// `count` of `all` parts of `memory` bytes, in MiB, rounded down; at least 1.
pub fn mebibytes(memory: u64, count: u32, all: u32) -> u64 {
    // Needs more than 64 bits for the intermediate result only.
    let bytes = u128::from(memory) * u128::from(count) / u128::from(all);
    ((bytes >> 20) as u64).max(1)
}

/// Chooses `size` of the available parts, beginning with those in `must`. All are of one GPU if one has enough of them,
/// and of such GPUs the one with the fewest free parts, so that the others keep room for larger shares.
pub fn prefer(available: &[String], must: &[String], size: usize) -> Vec<String> {
    let taken: BTreeSet<&str> = must.iter().map(String::as_str).collect();
    let began: BTreeSet<&str> = must.iter().filter_map(|id| Some(of_id(id)?.0)).collect();
    let missing = size.saturating_sub(must.len());
    let mut by_gpu: BTreeMap<&str, BTreeMap<u32, &String>> = BTreeMap::new();
    for id in available {
        if let Some((gpu, number)) = of_id(id)
            && !taken.contains(id.as_str())
        {
            by_gpu.entry(gpu).or_default().insert(number, id);
        }
    }
    let mut gpus: Vec<_> = by_gpu.into_iter().collect();
    gpus.sort_by_key(|(gpu, parts)| {
        let left = parts.len();
        let enough = left >= missing;
        let fewest = if enough { left } else { 0 };
        // If no GPU has enough parts, the container will be refused, but the list still has the requested length.
        (!began.contains(gpu), !enough, fewest, Reverse(left))
    });
    let more = gpus.into_iter().flat_map(|(_, parts)| parts.into_values());
    let more: Vec<&String> = more.take(missing).collect();
    must.iter().chain(more).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(gpu: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
        numbers.into_iter().map(|number| id(gpu, number)).collect()
    }

    #[test]
    fn parts_come_to_a_percentage_and_an_amount() {
        for (count, all, percent) in [
            (33, 100, 33),
            (100, 100, 100),
            (1, 3, 33),
            (2, 3, 66),
            (3, 3, 100),
            (1, 1, 100),
            (1, 1000, 1),
            (999, 1000, 99),
        ] {
            assert_eq!(percentage(count, all), percent, "{count} of {all}");
        }
        for (memory, count, all, amount) in [
            (80 << 30, 50, 100, 40 << 10),
            (4 << 30, 1, 3, 1365),
            (4 << 30, 3, 3, 4 << 10),
            (100 << 20, 1, 1000, 1),
            (u64::MAX, 1000, 1000, u64::MAX >> 20),
        ] {
            assert_eq!(mebibytes(memory, count, all), amount, "{count} of {all}");
        }
    }

    #[test]
    fn a_share_is_of_one_gpu() {
        assert_eq!(share(&ids("GPU-a", [0, 5, 17])), Ok(("GPU-a", 3)));
        assert_eq!(share(&ids("MIG-a", [3, 3])), Ok(("MIG-a", 1)));
        assert_eq!(share(&[]), Err(ShareError::Nothing));
        for wrong in ["GPU-a", "GPU-a::", "GPU-a::x", "GPU-a:1", ""] {
            let refused = Err(ShareError::NoPart(wrong.into()));
            assert_eq!(share(&[wrong.to_owned()]), refused);
        }
        let two = [ids("GPU-b", [0]), ids("GPU-a", [0, 1])].concat();
        let refused = share(&two).expect_err("two GPUs").to_string();
        assert!(refused.contains("3 parts"), "{refused}");
        assert!(refused.contains("of GPU-a and GPU-b"), "{refused}");
    }

    #[test]
    fn parts_of_one_gpu_are_preferred() {
        let (a, b, c) = (ids("a", 0..8), ids("b", 0..4), ids("c", 0..6));
        let all = [&b[..], &a, &c].concat();
        // The one with the fewest that has enough; in the order of their numbers.
        assert_eq!(prefer(&all, &[], 3), ids("b", 0..3));
        assert_eq!(prefer(&all, &[], 5), ids("c", 0..5));
        assert_eq!(prefer(&all, &[], 7), ids("a", 0..7));
        let ten = [ids("a", [9, 10, 2])].concat();
        assert_eq!(prefer(&ten, &[], 2), ids("a", [2, 9]));
        // Parts that the container already has determine the GPU, and are not chosen twice.
        let must = ids("a", [4]);
        assert_eq!(prefer(&all, &must, 3), ids("a", [4, 0, 1]));
        assert_eq!(prefer(&all, &must, 1), must);
        // No GPU has enough parts: as few GPUs as possible.
        let both = [ids("a", 0..8), ids("c", 0..1)].concat();
        assert_eq!(prefer(&all, &[], 9), both);
        assert_eq!(prefer(&all, &[], 100).len(), all.len());
        assert_eq!(prefer(&[], &[], 1), Vec::<String>::new());
    }
}
