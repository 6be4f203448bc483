//! Contexts: attaching to a device, limits.

use super::Reply;
use crate::engine::base::call::Incoming;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::gpu::context_limits::ContextLimit;
use crate::engine::gpu::devices::Device;
use crate::engine::lasting::{Lasting, Lost, Making, failed};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::{Attach, Limit};

/// Bytes (`CU_LIMIT_MAX_L2_FETCH_GRANULARITY`).
const L2_FETCH_MAX: u64 = 128;

impl Session {
    /// Sees to it that the device has a context.
    pub fn attach(&mut self, shared: &Shared, body: Attach) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.attach(&shared.gpu.driver)?;
        // Here, where it may take its time, and not with the first stream.
        self.part_of(shared, device)?;
        Ok(Vec::new())
    }

    /// `cuCtxGetLimit`.
    pub fn get_limit(&mut self, shared: &Shared, body: Limit) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        let mut value = 0;
        shared.gpu.driver.ctx_get_limit(&mut value, body.limit)?;
        // What a context begins with, not what another client made of it.
        Ok(super::value(
            device.first_limit(body.limit).unwrap_or(value as u64),
        ))
    }

    /// Whether `cuCtxSetLimit` has to raise one.
    pub fn raises_limit(&self, shared: &Shared, message: Incoming<'_>) -> bool {
        let Ok(body) = message.body::<Limit>() else {
            return false;
        };
        let Ok(device) = shared.gpu.device(body.device) else {
            return false;
        };
        let Some(wanted) = ContextLimit::new(body.limit, body.value) else {
            return false;
        };
        if !wanted.is_within_bounds(device) || device.make_current(&shared.gpu.driver).is_err() {
            return false;
        }
        let mut value = 0;
        let known = shared.gpu.driver.ctx_get_limit(&mut value, body.limit);
        known.is_ok() && wanted.value > value as u64
    }

    /// `cuCtxSetLimit`. The context is everyone's: a limit only grows, within bounds, and the client is told what its own
    /// would be.
    pub fn set_limit(&mut self, shared: &Shared, body: Limit) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        if let Some(wanted) = ContextLimit::new(body.limit, body.value) {
            let value = self.raise(shared, device, wanted)?;
            let key = u64::from(body.device) | u64::from(body.limit) << 32;
            self.describe::<RaisedLimit>(key, &body.value);
            return Ok(super::value(value));
        }
        shared.gpu.driver.ctx_get_limit(&mut 0, body.limit)?;
        match body.limit {
            // How the cache that all share is used: a wish that is heard and not granted.
            CU_LIMIT_MAX_L2_FETCH_GRANULARITY if body.value > L2_FETCH_MAX => {
                Err(CUDA_ERROR_INVALID_VALUE.into())
            }
            CU_LIMIT_MAX_L2_FETCH_GRANULARITY | CU_LIMIT_PERSISTING_L2_CACHE_SIZE => {
                Ok(super::value(body.value))
            }
            // The driver permits setting them in no context such as the server's.
            _ => Err(CUDA_ERROR_NOT_PERMITTED.into()),
        }
    }

    /// Has the context have at least this limit; returns the session's own.
    fn raise(
        &mut self,
        shared: &Shared,
        device: &Device,
        wanted: ContextLimit,
    ) -> Result<u64, CUresult> {
        let ContextLimit { limit, value } = wanted;
        let mut present = 0;
        shared.gpu.driver.ctx_get_limit(&mut present, limit)?;
        if !wanted.is_within_bounds(device) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let first = device.first_limit(limit).unwrap_or(present as u64);
        let limits = &mut self.objects.raised_limits;
        let bytes = wanted.taken(first, device);
        let before = limits.pay(&self.account, device.ordinal, limit, bytes)?;
        if value <= present as u64 {
            return Ok(value);
        }
        let set = shared.gpu.driver.ctx_set_limit(limit, value as usize);
        if let Err(status) = set.and_then(|()| shared.gpu.driver.ctx_get_limit(&mut present, limit))
        {
            limits.undo(device.ordinal, limit, before);
            return Err(status);
        }
        if limit == CU_LIMIT_STACK_SIZE {
            device.has_grown(present as u64);
        }
        Ok(present as u64)
    }
}

/// A limit that the session has raised.
pub struct RaisedLimit;

impl Lasting for RaisedLimit {
    const KIND: Kind = Kind::Limit;
    type State = u64;

    fn make(
        record: &Record,
        value: u64,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let shared = making.shared;
        let mut raise = || -> Result<u64, CUresult> {
            let wanted = ContextLimit::new((record.key >> 32) as u32, value);
            let device = shared.gpu.device(record.key as u32)?;
            device.make_current(&shared.gpu.driver)?;
            session.raise(shared, device, wanted.ok_or(CUDA_ERROR_INVALID_VALUE)?)
        };
        raise().map(drop).map_err(failed("a limit", record))
    }
}
