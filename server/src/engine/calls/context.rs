//! Contexts: attaching to a device, limits.

use super::super::Shared;
use super::super::session::Session;
use super::Reply;
use mpsshim_proto::message::{Attach, Limit};
use mpsshim_proto::ring::Message;

impl Session {
    /// Sees to it that the device has a context.
    pub fn attach(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Attach = self.body(message)?;
        shared.device(body.device)?.attach(&shared.driver)?;
        Ok(Vec::new())
    }

    /// `cuCtxGetLimit`.
    pub fn get_limit(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Limit = self.body(message)?;
        shared.device(body.device)?.make_current(&shared.driver)?;
        let mut value = 0;
        shared.driver.ctx_get_limit(&mut value, body.limit)?;
        Ok(super::value(value as u64))
    }

    /// `cuCtxSetLimit`. The context is everyone's: a limit only grows.
    pub fn set_limit(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Limit = self.body(message)?;
        shared.device(body.device)?.make_current(&shared.driver)?;
        let mut value = 0;
        shared.driver.ctx_get_limit(&mut value, body.limit)?;
        if body.value > value as u64 {
            shared
                .driver
                .ctx_set_limit(body.limit, body.value as usize)?;
            shared.driver.ctx_get_limit(&mut value, body.limit)?;
        }
        Ok(super::value(value as u64))
    }
}
