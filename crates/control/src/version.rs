use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use farpool_throttle::Throttle;
use futures_util::future::{Either, Ready, ready};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};

/// Version of the control plane's messages. Added fields do not raise it. It is raised when two releases
/// would misunderstand each other's requests or answers.
pub const CONTROL_VERSION: u32 = 1;

/// The prefix of a client's header `user-agent`; the version follows.
const AGENT: &str = "farpool-control/";

/// The value of that header.
pub(crate) fn agent() -> String {
    format!("{AGENT}{CONTROL_VERSION}")
}

/// A service that refuses clients of another version. A client that names no version (a tool) is served.
#[derive(Clone, Debug)]
pub(crate) struct Versioned<S> {
    inner: S,
    version: u32,
    /// Shared by all copies of the service: each connection has one.
    refusals: Arc<Throttle>,
}

impl<S> Versioned<S> {
    pub(crate) fn new(inner: S, version: u32) -> Self {
        Versioned { inner, version, refusals: Arc::default() }
    }

    fn check(&self, headers: &http::HeaderMap) -> Result<(), Status> {
        let agent = headers.get(http::header::USER_AGENT).and_then(|agent| agent.to_str().ok());
        let theirs = agent.and_then(|agent| agent.strip_prefix(AGENT)?.split(' ').next());
        let ours = self.version;
        match theirs {
            Some(theirs) if theirs.parse() != Ok(ours) => {
                let theirs: String = theirs.chars().take(LONGEST_VERSION).collect();
                if let Some(left_out) = self.refusals.occurs(Instant::now()) {
                    tracing::warn!(
                        theirs,
                        ours,
                        left_out,
                        "a peer of another version of the control plane was refused"
                    );
                }
                Err(Status::failed_precondition(format!(
                    "it speaks version {ours} of the control plane, and this side version {theirs}: \
                     run the same release of Farpool on both"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// The most characters of a peer's version to quote.
const LONGEST_VERSION: usize = 10;

impl<S> Service<http::Request<Body>> for Versioned<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<http::Response<Body>, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.check(request.headers()) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}
