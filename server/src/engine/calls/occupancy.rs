//! Occupancy.

use super::reply::{Reply, number};
use crate::engine::base::call::Call;
use crate::engine::calls::function::function_ready;
use crate::engine::calls::launch;
use crate::engine::lasting::resources::part_of;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::CUstream;
use mpsshim_proto::message::{Launch, Occupancy};

/// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`, `cuOccupancyAvailableDynamicSMemPerBlock`.
pub fn occupancy(session: &mut Session, shared: &Shared, body: Occupancy) -> Reply {
    let function = function_ready(session, shared, body.function)?;
    if body.kind == 0 {
        let mut blocks = 0;
        shared.gpu.driver.occupancy_max_active_blocks(
            &mut blocks,
            function,
            body.block,
            body.shared as usize,
            body.flags,
        )?;
        Ok(number(blocks as u64))
    } else {
        let mut bytes = 0;
        shared.gpu.driver.occupancy_available_shared(
            &mut bytes,
            function,
            body.shared as i32,
            body.block,
        )?;
        Ok(number(bytes as u64))
    }
}

/// `cuOccupancyMaxActiveClusters`, `cuOccupancyMaxPotentialClusterSize`.
pub fn clusters(session: &mut Session, shared: &Shared, call: Call<'_, Launch>) -> Reply {
    let Call { body, message } = call;
    let function = function_ready(session, shared, body.function)?;
    let attributes = launch::attributes(session, message, &body, None)?;
    let device = session.objects.functions.get(body.function)?.device;
    let driver = &shared.gpu.driver;
    // The result depends on the multiprocessors of the stream.
    let part = part_of(session, shared, &shared.gpu.devices[device])?;
    let stream = match &part {
        Some(part) => part.take_stream(driver, 0)?,
        None => CUstream::NULL,
    };
    let config = attributes.config(&body, stream);
    let mut clusters = 0;
    let answered = if body.flags == 0 {
        driver.occupancy_max_active_clusters(&mut clusters, function, &config)
    } else {
        driver.occupancy_max_cluster_size(&mut clusters, function, &config)
    };
    if let Some(part) = part {
        part.end_stream(driver, 0, stream);
    }
    answered?;
    Ok(number(clusters as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{FAULT, Fixture, Function, counts, obeys, others};
    use mpsshim_api::cuda::*;
    use mpsshim_proto::message::{ATTRIBUTES_MAX, Op};

    /// The question, its kind or flags, and the driver's function.
    const QUESTIONS: [(Op, u32, &str); 4] = [
        (
            Op::Occupancy,
            0,
            "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
        ),
        (Op::Occupancy, 1, "cuOccupancyAvailableDynamicSMemPerBlock"),
        (Op::Clusters, 0, "cuOccupancyMaxActiveClusters"),
        (Op::Clusters, 1, "cuOccupancyMaxPotentialClusterSize"),
    ];

    fn ask(test: &mut Fixture, op: Op, kind: u32, function: u64) -> CUresult {
        let occupancy = Occupancy {
            function,
            kind,
            ..Occupancy::default()
        };
        let clusters = Launch {
            function,
            flags: kind,
            ..Launch::default()
        };
        match op {
            Op::Occupancy => test.told(op, &occupancy, &[]),
            _ => test.told(op, &clusters, &[]),
        }
    }

    #[test]
    fn the_driver_is_asked_of_functions_of_the_session_only() {
        let mut test = Fixture::new(&QUESTIONS.map(|(.., name)| (name, counts as Function)));
        let function = test.function();
        for (op, kind, name) in QUESTIONS {
            for function in others(function) {
                let status = ask(&mut test, op, kind, function);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{name}");
            }
            assert_eq!(test.calls(), 0, "{name}");
            assert_eq!(ask(&mut test, op, kind, function), CUDA_SUCCESS);
            assert_eq!(test.calls(), 1, "{name}");
        }
    }

    #[test]
    fn an_occupancy_that_the_driver_does_not_tell_is_its_error() {
        for (op, kind, name) in QUESTIONS {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let function = test.function();
            for (status, ends) in [(CUDA_ERROR_INVALID_VALUE, false), (FAULT, true)] {
                test.orders(status);
                assert_eq!(ask(&mut test, op, kind, function), status, "{name}");
                assert_eq!(test.has_ended(), ends, "{name} {status}");
            }
        }
    }

    #[test]
    fn attributes_of_clusters_fit_the_message() {
        let mut test = Fixture::new(&[("cuOccupancyMaxActiveClusters", counts as Function)]);
        let body = Launch {
            function: test.function(),
            ..Launch::default()
        };
        for attributes in [1, ATTRIBUTES_MAX as u32 + 1] {
            let body = Launch { attributes, ..body };
            assert!(test.is_violation(Op::Clusters, &body, &[]), "{attributes}");
        }
        let one = Launch {
            attributes: 1,
            ..body
        };
        let mut unknown = [0; size_of::<CUlaunchAttribute>()];
        unknown[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        let status = test.status(Op::Clusters, &one, &unknown);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_VALUE, 0));
    }
}
