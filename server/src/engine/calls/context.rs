//! Contexts: attaching to a device, limits.

use super::super::Shared;
use super::super::bounds;
use super::super::session::Session;
use super::Reply;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::{Attach, Limit};
use mpsshim_proto::ring::Message;

/// Bytes (`CU_LIMIT_MAX_L2_FETCH_GRANULARITY`).
const L2_FETCH_MAX: u64 = 128;

/// What the driver makes of a limit (measured: 580.159.04).
fn rounded(limit: CUlimit, value: u64) -> u64 {
    match limit {
        CU_LIMIT_STACK_SIZE => value.div_ceil(16).saturating_mul(16),
        CU_LIMIT_PRINTF_FIFO_SIZE => value.max(512 << 10),
        CU_LIMIT_MALLOC_HEAP_SIZE => value.max(4 << 20),
        CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => value.max(32),
        _ => value,
    }
}

impl Session {
    /// Sees to it that the device has a context.
    pub fn attach(&mut self, shared: &Shared, body: Attach) -> Reply {
        let device = shared.device(body.device)?;
        device.attach(&shared.driver)?;
        // Here, where it may take its time, and not with the first stream.
        self.part_of(shared, device)?;
        Ok(Vec::new())
    }

    /// `cuCtxGetLimit`.
    pub fn get_limit(&mut self, shared: &Shared, body: Limit) -> Reply {
        let device = shared.device(body.device)?;
        device.make_current(&shared.driver)?;
        let mut value = 0;
        shared.driver.ctx_get_limit(&mut value, body.limit)?;
        // What a context begins with, not what another client made of it.
        Ok(super::value(
            device.first_limit(body.limit).unwrap_or(value as u64),
        ))
    }

    /// Whether `cuCtxSetLimit` has to raise one.
    pub fn raises_limit(&self, shared: &Shared, message: &Message) -> bool {
        let Ok(body) = self.body::<Limit>(message) else {
            return false;
        };
        let device = shared.device(body.device);
        if device
            .and_then(|device| device.make_current(&shared.driver))
            .is_err()
        {
            return false;
        }
        let mut value = 0;
        let known = shared.driver.ctx_get_limit(&mut value, body.limit);
        known.is_ok() && rounded(body.limit, body.value) > value as u64
    }

    /// `cuCtxSetLimit`. The context is everyone's: a limit only grows, and the client is told what its own would be.
    pub fn set_limit(&mut self, shared: &Shared, body: Limit) -> Reply {
        let device = shared.device(body.device)?;
        device.make_current(&shared.driver)?;
        let driver = &shared.driver;
        let mut value = 0;
        driver.ctx_get_limit(&mut value, body.limit)?;
        match body.limit {
            CU_LIMIT_STACK_SIZE..=CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => {
                let wanted = rounded(body.limit, body.value);
                // Elsewhere it is what it was at first.
                let first = device.first_limit(body.limit);
                self.raised_limits |= first.is_none_or(|first| wanted > first);
                if wanted <= value as u64 {
                    return Ok(super::value(wanted));
                }
                if body.limit == CU_LIMIT_PRINTF_FIFO_SIZE && wanted > bounds::PRINT_BUFFER {
                    return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
                }
                driver.ctx_set_limit(body.limit, body.value as usize)?;
                driver.ctx_get_limit(&mut value, body.limit)?;
                if body.limit == CU_LIMIT_STACK_SIZE {
                    device.has_grown(value as u64);
                }
            }
            // How the cache that all share is used: a wish that is heard and not granted.
            CU_LIMIT_MAX_L2_FETCH_GRANULARITY if body.value > L2_FETCH_MAX => {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            CU_LIMIT_MAX_L2_FETCH_GRANULARITY | CU_LIMIT_PERSISTING_L2_CACHE_SIZE => {
                return Ok(super::value(body.value));
            }
            // The driver permits setting them in no context such as the server's.
            _ => return Err(CUDA_ERROR_NOT_PERMITTED.into()),
        }
        Ok(super::value(value as u64))
    }
}
