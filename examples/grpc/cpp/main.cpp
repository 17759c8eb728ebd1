// A product of matrices by gRPC, from C++. Debian: libgrpc++-dev protobuf-compiler protobuf-compiler-grpc pkg-config.
// To build, from the root of the repository:
//
//   protoc -I proto --cpp_out=build --grpc_out=build --plugin=protoc-gen-grpc=$(which grpc_cpp_plugin) \
//     proto/tilewright/v1/*.proto
//   g++ -std=c++17 -I build examples/grpc/cpp/main.cpp build/tilewright/v1/*.cc \
//     $(pkg-config --cflags --libs grpc++ protobuf) -o product
//   ./product unix:/path/of/the.sock        (or 127.0.0.1:50051)

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "tilewright/v1/dispatch.grpc.pb.h"
#include "tilewright/v1/memory.grpc.pb.h"

namespace tw = tilewright::v1;

static void add_input(tw::RunRequest& request, const char* name, int rows, int columns,
                      const std::vector<float>& values) {
    tw::Operand* operand = request.add_inputs();
    operand->set_name(name);
    operand->mutable_spec()->set_dtype(tw::FP32);
    operand->mutable_spec()->add_shape(rows);
    operand->mutable_spec()->add_shape(columns);
    operand->mutable_location()->set_inline_(values.data(), values.size() * sizeof(float));
}

int main(int count, char** arguments) {
    const std::string address = count > 1 ? arguments[1] : "127.0.0.1:50051";
    const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());

    // The session lives as long as this stream. What it owns (regions, buffers, plans) ends with it.
    grpc::ClientContext lease;
    tw::OpenSessionRequest open;
    open.set_client_name("examples/grpc/cpp");
    const auto stream = tw::Memory::NewStub(channel)->OpenSession(&lease, open);
    tw::SessionEvent event;
    if (!stream->Read(&event)) {
        std::fprintf(stderr, "no session: %s\n", stream->Finish().error_message().c_str());
        return 1;
    }

    const int m = 5, n = 7, k = 9;
    std::vector<float> a(m * k), b(k * n);
    for (int i = 0; i < m * k; ++i) a[i] = float(i % 5 - 2);
    for (int i = 0; i < k * n; ++i) b[i] = float(i % 7 - 3);
    tw::RunRequest request;
    request.set_session(event.opened().session());
    request.set_operation("gemm");
    add_input(request, "a", m, k, a);
    add_input(request, "b", k, n, b);
    (*request.mutable_attributes())["unary"].set_text("Relu");

    grpc::ClientContext call;
    tw::RunReply reply;
    const grpc::Status status = tw::Dispatch::NewStub(channel)->Run(&call, request, &reply);
    if (!status.ok()) {
        std::fprintf(stderr, "refused: %s\n", status.error_message().c_str());
        return 1;
    }

    const auto* out = reinterpret_cast<const float*>(reply.outputs(0).inline_().data());
    for (int i = 0; i < m * n; ++i) {
        float sum = 0;
        for (int j = 0; j < k; ++j) sum += a[i / n * k + j] * b[j * n + i % n];
        if (std::fabs(out[i] - std::fmax(sum, 0.0f)) > 1e-4f) {
            std::fprintf(stderr, "wrong at %d: %g\n", i, out[i]);
            return 1;
        }
    }
    const tw::Report& report = reply.report();
    std::printf("%d x %d is right, by %s on %s\n", m, n, report.kernels(0).c_str(), report.device().c_str());
    lease.TryCancel();
    stream->Finish();
}
