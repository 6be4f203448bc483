//! The linker.

use super::{Logged, Reply};
use crate::engine::base::bounds;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::jit::JitOptions;
use crate::engine::gpu::host::is_affordable;
use crate::engine::images::contents::is_whole;
use crate::engine::objects::links::{Link, LinkThread};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::image::{LinkAdd, LinkCreate};
use mpsshim_proto::shm::{self, is_sealed, read_sealed};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use zerocopy::IntoBytes;

impl Session {
    /// `cuLinkCreate`.
    pub fn link_create(&mut self, shared: &Shared, call: Call<'_, LinkCreate>) -> Reply {
        let Call { body, message } = call;
        let behind = message.behind::<LinkCreate>()?;
        let (mut options, _) =
            JitOptions::read(&behind, body.options).map_err(CallError::Violation)?;
        options.want(body.info_log, body.error_log);
        let device = shared.gpu.device(body.device)?;
        if self.objects.links.len() >= bounds::LINKS {
            return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        let thread = LinkThread::new()?;
        let raw = thread.install(|| -> Result<_, CUresult> {
            device.make_current(&shared.gpu.driver)?;
            let mut raw = CUlinkState::NULL;
            let (count, names, values) = options.raw()?;
            let image = &shared.gpu.driver.image;
            image.link_create(count, names, values, &mut raw)?;
            Ok(raw)
        })?;
        let link = Link {
            raw,
            thread,
            options,
            cubin: None,
        };
        if let Err((status, link)) = self.objects.links.insert(body.link, link) {
            link.end(shared);
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// `cuLinkAddData`. Files are read by the client.
    pub fn link_add(&mut self, shared: &Shared, call: Call<'_, LinkAdd>) -> Logged {
        let Call { body, message } = call;
        let behind = message.behind::<LinkAdd>()?;
        let (mut options, name) =
            JitOptions::read(&behind, body.options).map_err(CallError::Violation)?;
        let Some(end) = name.iter().position(|byte| *byte == 0) else {
            return Err(CallError::Violation("a name without its end".into()));
        };
        let name = &name[..=end];
        let data = match message.token {
            0 => Err(CUDA_ERROR_INVALID_VALUE),
            token => received(self.receive_descriptor(token)?.as_fd(), body.len),
        };
        let link = self.objects.links.get_mut(body.link)?;
        let mut data = data?;
        if body.kind >= CU_JIT_NUM_INPUT_TYPES {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let raw = link.raw;
        let status = link.thread.install(|| {
            let (count, names, values) = options.raw()?;
            shared.gpu.driver.image.link_add_data(
                raw,
                body.kind,
                data.as_mut_ptr(),
                body.len as usize,
                name.as_ptr().cast(),
                count,
                names,
                values,
            )
        });
        Ok((status, link.options.outcome(0)))
    }

    /// `cuLinkComplete`.
    pub fn link_complete(&mut self, shared: &Shared, body: Object) -> Logged {
        let link = self.objects.links.get_mut(body.object)?;
        let raw = link.raw;
        let completed = link.thread.install(|| {
            let (mut cubin, mut len) = (std::ptr::null(), 0);
            let image = &shared.gpu.driver.image;
            image.link_complete(raw, &mut cubin, &mut len)?;
            if cubin.is_null() {
                return Ok(None);
            }
            // SAFETY: the driver's result, which stays until the link is destroyed.
            Ok(Some(
                unsafe { std::slice::from_raw_parts(cubin, len) }.to_vec(),
            ))
        });
        let mut len = 0;
        let status = completed.map(|cubin| {
            if let Some(cubin) = cubin {
                len = cubin.len() as u64;
                link.cubin = Some(cubin);
            }
        });
        Ok((status, link.options.outcome(len)))
    }

    /// Sends the cubin of a completed link over the socket, before the answer, under the message's token.
    pub fn link_fetch(&mut self, _: &Shared, call: Call<'_, Object>) -> Reply {
        let Call { body, message } = call;
        let link = self.objects.links.get(body.object)?;
        let cubin = link.cubin.as_ref().ok_or(CUDA_ERROR_NOT_FOUND)?;
        let file = || -> std::io::Result<File> {
            let mut file = File::from(shm::sealed_memfd(c"cubin", cubin.len() as u64)?);
            file.write_all(cubin)?;
            Ok(file)
        };
        let file = file().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let note = DescriptorNote {
            token: message.token,
            len: cubin.len() as u64,
        };
        shm::send_packet(self.shared.socket(), note.as_bytes(), &[file.as_fd()])
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(Vec::new())
    }

    /// `cuLinkDestroy`.
    pub fn link_destroy(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        let link = self.objects.links.remove(body.object)?;
        link.end(shared);
        Ok(())
    }
}

impl Link {
    /// `cuLinkDestroy`; afterwards, nothing refers to the options any more.
    pub fn end(self, shared: &Shared) {
        let _ = self
            .thread
            .install(|| shared.gpu.driver.image.link_destroy(self.raw));
    }
}

/// A copy of a client's input, followed by a NUL.
fn received(fd: BorrowedFd<'_>, len: u64) -> Result<Vec<u8>, CUresult> {
    if len == 0 || len > bounds::LINK_INPUT || !is_sealed(fd, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !is_affordable(len) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mut bytes = vec![0u8; len as usize + 1];
    let input = &mut bytes[..len as usize];
    read_sealed(fd, input).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if !is_whole(input) {
        return Err(CUDA_ERROR_INVALID_IMAGE);
    }
    Ok(bytes)
}
