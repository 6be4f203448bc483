//! gRPC over Unix sockets without generated code. A service is a function that dispatches on the path of a request.

use prost::Message;
use std::convert::Infallible;
use std::future::{self, Future};
use std::path::Path;
use tokio::net::UnixListener;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming, client, server};
use tonic_prost::ProstCodec;
use tower::service_fn;

/// A call as it comes in.
pub type Call = http::Request<Body>;
/// Reply to a call.
pub type Reply = http::Response<Body>;

/// Answers a call with one message.
pub async fn answer<Q, A>(call: Call, how: impl Fn(Q) -> Result<A, Status>) -> Reply
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let service =
        service_fn(|asked: Request<Q>| future::ready(how(asked.into_inner()).map(Response::new)));
    let mut grpc = server::Grpc::new(ProstCodec::<A, Q>::default());
    grpc.unary(service, call).await
}

/// Answers a call with a stream of messages.
pub async fn stream<Q, A, S>(call: Call, how: impl Fn(Q) -> S) -> Reply
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
    S: Stream<Item = Result<A, Status>> + Send + 'static,
{
    let service =
        service_fn(|asked: Request<Q>| future::ready(Ok(Response::new(how(asked.into_inner())))));
    let mut grpc = server::Grpc::new(ProstCodec::<A, Q>::default());
    grpc.server_streaming(service, call).await
}

/// Answers an unknown call.
pub fn unknown(call: &Call) -> Reply {
    Status::unimplemented(format!("no call {}", call.uri().path())).into_http()
}

/// Serves `route` at a socket until the future is dropped or the socket fails.
///
/// # Errors
/// Those of the socket.
pub async fn serve<F>(
    listener: UnixListener,
    route: impl Fn(Call) -> F + Clone + Send + 'static,
) -> Result<(), tonic::transport::Error>
where
    F: Future<Output = Reply> + Send + 'static,
{
    let service = service_fn(move |call| {
        let reply = route(call);
        async move { Ok::<_, Infallible>(reply.await) }
    });
    let incoming = UnixListenerStream::new(listener);
    Server::builder()
        .serve_with_incoming(service, incoming)
        .await
}

/// Connects to a socket.
///
/// # Errors
/// Nothing listens at the socket.
pub async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display()))?;
    endpoint.connect().await
}

async fn ready(channel: &Channel) -> Result<client::Grpc<Channel>, Status> {
    let mut grpc = client::Grpc::new(channel.clone());
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::from_error(error.into()))?;
    Ok(grpc)
}

/// Asks and waits for the answer.
///
/// # Errors
/// The answer is one, or the connection broke.
pub async fn ask<Q, A>(channel: &Channel, path: &'static str, question: Q) -> Result<A, Status>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let mut grpc = ready(channel).await?;
    let path = http::uri::PathAndQuery::from_static(path);
    let codec = ProstCodec::<Q, A>::default();
    let answer = grpc.unary(Request::new(question), path, codec).await?;
    Ok(answer.into_inner())
}

/// Asks for a stream.
///
/// # Errors
/// As of [`ask`].
pub async fn watch<Q, A>(
    channel: &Channel,
    path: &'static str,
    question: Q,
) -> Result<Streaming<A>, Status>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let mut grpc = ready(channel).await?;
    let path = http::uri::PathAndQuery::from_static(path);
    let codec = ProstCodec::<Q, A>::default();
    let answer = grpc
        .server_streaming(Request::new(question), path, codec)
        .await?;
    Ok(answer.into_inner())
}
