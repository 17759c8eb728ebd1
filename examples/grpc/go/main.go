// A product of matrices by gRPC, from Go. Stubs, from the root of the repository (protoc-gen-go, protoc-gen-go-grpc):
//
//	protoc -I proto --go_out=SRC --go-grpc_out=SRC proto/tilewright/v1/*.proto
//
// where SRC is a module's folder or $GOPATH/src: the package is `tilewright/v1`. Then: go run main.go unix:/path/of/the.sock
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"

	"google.golang.org/grpc"

	tw "tilewright/v1"
)

func input(name string, rows, columns int64, values []float32) *tw.Operand {
	var data bytes.Buffer
	if err := binary.Write(&data, binary.LittleEndian, values); err != nil {
		log.Fatal(err)
	}
	spec := &tw.TensorSpec{Dtype: tw.DType_FP32, Shape: []int64{rows, columns}}
	return &tw.Operand{Name: name, Spec: spec, Location: &tw.Location{Place: &tw.Location_Inline{Inline: data.Bytes()}}}
}

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	// The session lives as long as this stream. What it owns (regions, buffers, plans) ends with it.
	lease, end := context.WithCancel(context.Background())
	defer end()
	stream, err := tw.NewMemoryClient(connection).OpenSession(lease, &tw.OpenSessionRequest{ClientName: "examples/grpc/go"})
	if err != nil {
		log.Fatal(err)
	}
	event, err := stream.Recv()
	if err != nil {
		log.Fatal("no session: ", err)
	}

	const m, n, k = 5, 7, 9
	a, b := make([]float32, m*k), make([]float32, k*n)
	for i := range a {
		a[i] = float32(i%5 - 2)
	}
	for i := range b {
		b[i] = float32(i%7 - 3)
	}
	reply, err := tw.NewDispatchClient(connection).Run(context.Background(), &tw.RunRequest{
		Session:    event.GetOpened().GetSession(),
		Operation:  "gemm",
		Inputs:     []*tw.Operand{input("a", m, k, a), input("b", k, n, b)},
		Attributes: map[string]*tw.Attribute{"unary": {Value: &tw.Attribute_Text{Text: "Relu"}}},
	})
	if err != nil {
		log.Fatal("refused: ", err)
	}

	out := make([]float32, m*n)
	if err := binary.Read(bytes.NewReader(reply.Outputs[0].Inline), binary.LittleEndian, out); err != nil {
		log.Fatal(err)
	}
	for i := range out {
		var sum float32
		for j := 0; j < k; j++ {
			sum += a[i/n*k+j] * b[j*n+i%n]
		}
		if want := max(sum, 0); out[i]-want > 1e-4 || want-out[i] > 1e-4 {
			log.Fatalf("wrong at %d: %g, not %g", i, out[i], want)
		}
	}
	fmt.Printf("%d x %d is right, by %s on %s\n", m, n, reply.Report.Kernels[0], reply.Report.Device)
}

func max(x, y float32) float32 {
	if x > y {
		return x
	}
	return y
}
